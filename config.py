"""K3Config: the sizes and switches of a K3-family model, under the names of config.json."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "mxfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "weights": {
                "num_bits": 4,
                "type": "float",
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
            },
        }
    },
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
}


def _k3_linear_attn():
    full = [*range(4, 93, 4), 93]
    return {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "full_attn_layers": full,  # both lists are 1-based
        "kda_layers": [n for n in range(1, 94) if n not in full],
    }


@dataclass
class K3Config:
    """The text configuration under the published names, by default the released K3. In a file, absent means off."""

    model_type: str = "kimi_k3"  # kimi_k3: text_config inside; kimi_linear: the text config is the file
    vocab_size: int = 163840
    hidden_size: int = 7168
    intermediate_size: int = 33792
    num_hidden_layers: int = 93
    hidden_act: str = "situ"
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0
    rms_norm_eps: float = 1e-5
    max_position_embeddings: int = 1048576
    tie_word_embeddings: bool = False
    num_attention_heads: int = 96
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    mla_use_nope: bool = True
    mla_use_output_gate: bool = True
    num_experts: int = 896
    num_experts_per_token: int = 16
    num_shared_experts: int = 2
    moe_intermediate_size: int = 3072
    routed_expert_hidden_size: int | None = 3584
    latent_moe_use_norm: bool = True
    moe_renormalize: bool = True
    moe_router_activation_func: str = "sigmoid"
    topk_method: str = "noaux_tc"
    use_grouped_topk: bool = True
    num_expert_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    moe_layer_freq: int = 1
    attn_res_block_size: int | None = 12
    num_nextn_predict_layers: int = 0
    bos_token_id: int | list | None = 163584
    eos_token_id: int | list | None = 163586
    pad_token_id: int | None = 163839
    linear_attn_config: dict = field(default_factory=_k3_linear_attn)

    @classmethod
    def k3(cls):
        """The released configuration."""
        return cls()

    @classmethod
    def from_json(cls, path):
        """Reads a config.json, wrapped in `text_config` or flat; or its folder, where generation_config.json may name
        further end ids. ValueError: not a K3-family model."""
        folder = Path(path) if Path(path).is_dir() else None
        path = folder / "config.json" if folder else Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no config.json there; a checkpoint folder holds one beside its safetensors"
            )
        top = read_object(path)
        text = top.get("text_config") or top
        if not isinstance(text, dict):
            raise ValueError(f"{path}: text_config holds a {type(text).__name__}, not a configuration")
        outer = {name: top.get(name) for name in OUTER if text.get(name) is None}  # where a wrapped config may have it
        outer["max_position_embeddings"] = text.get("max_position_embeddings") or text.get("model_max_length")
        text = text | outer
        values, missing = {}, []
        for f in dataclasses.fields(cls):
            value = text.get(f.name)
            if value is None or value is False:
                value = OFF.get(f.name, False if f.type is bool else None if "None" in str(f.type) else 0)
            if f.name in REQUIRED and not value:
                missing.append(f.name)
            values[f.name] = value
        if missing:
            raise ValueError(
                f"{path}: no {', '.join(missing)} in the configuration; is this a Kimi K3 or Kimi-Linear checkpoint?"
            )
        values["model_type"] = "kimi_k3" if top.get("text_config") else "kimi_linear"
        if folder:
            known, ids = values["eos_token_id"], end_ids(generation_config(folder).get("eos_token_id"))
            more = [id for id in ids if id not in end_ids(known)]
            values["eos_token_id"] = end_ids(known) + more if more else known
        quant = text.get("quantization_config") or top.get("quantization_config")
        if quant:
            kind = [quant.get(k) for k in ("quant_method", "format")] if isinstance(quant, dict) else quant
            if kind != [QUANTIZATION["quant_method"], QUANTIZATION["format"]]:
                raise ValueError(f"{path}: quantization {kind} is not supported; MXFP4 is (mxfp4-pack-quantized)")
        try:
            return cls(**values)
        except ValueError as e:
            raise ValueError(f"{path}: {e}") from None

    def to_json(self, quantized=False):
        """The config.json of this model as a dict, in the layout it came in."""
        text = dataclasses.asdict(self)
        arch = "KimiK3ForConditionalGeneration" if self.wrapped else "KimiLinearForCausalLM"
        top = {"architectures": [arch], "model_type": self.model_type}
        text["model_type"] = "kimi_linear"
        top |= {"text_config": text} if self.wrapped else text
        return top | ({"quantization_config": QUANTIZATION} if quantized else {})

    def __post_init__(self):
        def need(ok, what):
            if not ok:
                raise ValueError(what)

        for f in dataclasses.fields(self):
            value, kinds = getattr(self, f.name), tuple(k for k in TYPES if k.__name__ in str(f.type))
            kinds += (int,) if float in kinds else (type(None),) if "None" in str(f.type) else ()
            need(isinstance(value, kinds), f"{f.name} is {value!r}, not {' or '.join(k.__name__ for k in kinds)}")
        ids = end_ids(self.eos_token_id)
        need(all(type(id) is int for id in ids), f"eos_token_id is {ids}, not a list of ids")
        L, linear = self.num_hidden_layers, self.linear_attn_config
        need(
            self.hidden_act in ("situ", "silu"),
            f"hidden_act {self.hidden_act!r} is unknown; situ and silu are supported",
        )
        need(self.mla_use_nope, "mla_use_nope must be true: rotary position embedding in MLA is not supported")
        router, method = self.moe_router_activation_func, self.topk_method
        need(
            router in ("sigmoid", "softmax"),
            f"moe_router_activation_func {router!r} is unknown; sigmoid and softmax are supported",
        )
        need(method == "noaux_tc", f"topk_method {method!r} is not supported; noaux_tc is")
        need(
            self.num_nextn_predict_layers in (0, 1),
            f"num_nextn_predict_layers {self.num_nextn_predict_layers}: 0 or 1 is supported",
        )
        keys = ("num_heads", "head_dim", "short_conv_kernel_size", "kda_layers", "full_attn_layers")
        absent = [k for k in keys if linear.get(k) is None]
        need(not absent, f"linear_attn_config has no {', '.join(absent)}")
        lists = linear["kda_layers"], linear["full_attn_layers"]
        need(all(isinstance(x, list) for x in lists), "kda_layers and full_attn_layers must be lists of layer numbers")
        layers = sorted(lists[0] + lists[1])
        need(
            layers == list(range(1, L + 1)),
            f"kda_layers and full_attn_layers must name each of the layers 1..{L} once, not {layers}",
        )
        if self.num_experts:
            e, k, g, kept = self.num_experts, self.num_experts_per_token, self.num_expert_group, self.topk_group
            need(self.moe_intermediate_size > 0, "moe_intermediate_size is missing")
            need(0 < k <= e, f"num_experts_per_token {k} must be between 1 and num_experts {e}")
            need(
                e % g == 0 and 0 < kept <= g,
                f"num_experts {e}, num_expert_group {g} and topk_group {kept} do not fit together",
            )
            need(
                not self.use_grouped_topk or k <= kept * e // g,
                f"num_experts_per_token {k} does not fit {kept} groups of {e // g}",
            )

    # What the layers ask for.
    wrapped = property(lambda self: self.model_type == "kimi_k3")
    kda_heads = property(lambda self: self.linear_attn_config["num_heads"])
    kda_head_dim = property(lambda self: self.linear_attn_config["head_dim"])
    conv_kernel = property(lambda self: self.linear_attn_config["short_conv_kernel_size"])
    use_full_rank_gate = property(lambda self: bool(self.linear_attn_config.get("use_full_rank_gate")))
    gate_lower_bound = property(lambda self: self.linear_attn_config.get("gate_lower_bound") or None)
    # K3 stores A_log padded with zeros to head_dim; Kimi-Linear stores one value a head.
    A_log_size = property(lambda self: max(self.kda_heads, self.kda_head_dim) if self.wrapped else self.kda_heads)

    @property
    def kda_layers(self):
        """0-based numbers of the KDA layers."""
        return [n - 1 for n in sorted(self.linear_attn_config["kda_layers"])]

    @property
    def mla_layers(self):
        """0-based numbers of the MLA layers."""
        return [n - 1 for n in sorted(self.linear_attn_config["full_attn_layers"])]

    @property
    def eos_ids(self):
        """The ids that end a text, as a set."""
        return set(end_ids(self.eos_token_id))

    def is_moe(self, layer):
        """Whether the feed-forward part of this layer (0-based) is MoE; the MTP layer, one past the last, always is."""
        main = layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0
        return bool(self.num_experts) and (main or layer == self.num_hidden_layers)


def end_ids(value):
    """An eos_token_id (an id, a list, or None) as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def generation_config(folder):
    """The folder's generation_config.json as a dict, {} where there is none. ValueError: malformed."""
    path = Path(folder) / "generation_config.json"
    found = read_object(path) if path.is_file() else {}
    if not all(type(id) is int for id in end_ids(found.get("eos_token_id"))):
        raise ValueError(f"{path}: eos_token_id is {found['eos_token_id']!r:.80}, neither an id nor a list of ids")
    return found


def read_object(path):
    """path: Path of a JSON file -> the dict in it, or a ValueError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise ValueError(f"{path}: not valid JSON ({e})") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds a {type(value).__name__}, not a configuration")
    return value


# Fields that a wrapped config may have at its top level instead of in text_config.
OUTER = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings")
TYPES = (bool, int, float, str, list, dict)
# What an absent, null or false field means where that is not off, zero or none.
OFF = {"num_expert_group": 1, "topk_group": 1, "moe_layer_freq": 1, "routed_scaling_factor": 1.0, "rms_norm_eps": 1e-5}
OFF |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "max_position_embeddings": 1048576}
OFF |= {"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc"}
REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "num_attention_heads"}
REQUIRED |= {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_attn_config"}
