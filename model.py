"""Kimi K3, the whole model: configuration, decoder layer, K3, and the multi-token prediction (MTP) head.

    s = embed(ids)
    for each layer:  x = mixture of the block snapshots and s  (attnres.py)
                     s = s + KDA or MLA (RMSNorm(x));   x = mixture;   s = s + MoE or MLP (RMSNorm(x))
    h = mixture over all snapshots and s;   logits = lm_head(RMSNorm(h))

Three of four layers are KDA (kda.py), every fourth and the last are MLA (mla.py); all but the first feed-forward layer
are MoE (moe.py). Kimi-Linear is the same model with parts switched off by config.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import checkpoint
from attnres import AttnRes, RMSNorm, wide
from cache import Batch
from kda import KDA
from mla import MLA
from moe import MLP, MoE


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
    """The text configuration, under the published names; the defaults are the released Kimi K3. In a file, absent
    means off.
    """

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
    bos_token_id: int | None = 163584
    eos_token_id: int | list | None = 163586
    pad_token_id: int | None = 163839
    linear_attn_config: dict = field(default_factory=_k3_linear_attn)

    @classmethod
    def k3(cls):
        """The released configuration."""
        return cls()

    @classmethod
    def from_json(cls, path):
        """Reads a config.json (or its folder), wrapped in `text_config` or flat. Raises ValueError where it is not a
        K3-family model.
        """
        path = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
        if not path.is_file():
            raise FileNotFoundError(
                f"{path}: no config.json there; a checkpoint folder holds one beside its safetensors"
            )
        try:
            top = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as e:
            raise ValueError(f"{path}: not valid JSON ({e})") from None
        if not isinstance(top, dict):
            raise ValueError(f"{path}: holds a {type(top).__name__}, not a configuration")
        text = top.get("text_config") or top
        off = {
            "num_expert_group": 1,
            "topk_group": 1,
            "moe_layer_freq": 1,
            "routed_scaling_factor": 1.0,
            "rms_norm_eps": 1e-5,
        }
        off |= {"activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0, "max_position_embeddings": 1048576}
        off |= {"moe_router_activation_func": "sigmoid", "topk_method": "noaux_tc"}
        values, missing = {}, []
        for f in dataclasses.fields(cls):
            value = text.get(f.name)
            if value is None:
                value = off.get(f.name, False if f.type is bool else None if "None" in str(f.type) else 0)
            if f.name in REQUIRED and not value:
                missing.append(f.name)
            values[f.name] = value
        if missing:
            raise ValueError(
                f"{path}: no {', '.join(missing)} in the configuration; is this a Kimi K3 or Kimi-Linear checkpoint?"
            )
        values["model_type"] = "kimi_k3" if "text_config" in top else "kimi_linear"
        quant = text.get("quantization_config") or top.get("quantization_config")
        if quant and (quant.get("quant_method"), quant.get("format")) != ("compressed-tensors", "mxfp4-pack-quantized"):
            raise ValueError(
                f"{path}: quantization {quant.get('quant_method')}/{quant.get('format')} is not supported; MXFP4 is"
            )
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
        return top | ({"quantization_config": checkpoint.QUANTIZATION} if quantized else {})

    def __post_init__(self):
        def need(ok, what):
            if not ok:
                raise ValueError(what)

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
        layers = sorted(linear["kda_layers"] + linear["full_attn_layers"])
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
        return set(self.eos_token_id) if isinstance(self.eos_token_id, list) else {self.eos_token_id} - {None}

    def is_moe(self, layer):
        return bool(self.num_experts) and layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0


REQUIRED = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "num_attention_heads"}
REQUIRED |= {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_attn_config"}


class DecoderLayer(nn.Module):
    """Attention and feed-forward around the residual stream: with AttnRes, or plain pre-norm where the config has
    none.
    """

    def __init__(self, cfg, layer, attn_res):
        super().__init__()
        if layer in cfg.kda_layers:
            self.self_attn = KDA(cfg, cfg.kda_layers.index(layer))
        else:  # the MTP layer, one past the last, is MLA too
            self.self_attn = MLA(cfg, len([n for n in cfg.mla_layers if n < layer]))
        self.ffn = MoE(cfg) if cfg.is_moe(layer) else MLP(cfg, cfg.intermediate_size)
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.starts_block = attn_res and layer % cfg.attn_res_block_size == 0
        self.self_attention_res = AttnRes(cfg) if attn_res else None
        self.mlp_res = AttnRes(cfg) if attn_res else None

    def forward(self, s, blocks, batch):
        """s [N, H]: the running sum; blocks: the list of snapshots, to which a layer at a block start appends -> the
        new s.
        """
        if self.self_attention_res is None:
            s = s + self.self_attn(self.input_layernorm(s), batch)
            return s + self.ffn(self.post_attention_layernorm(s))
        x = self.self_attention_res(blocks, s)
        if self.starts_block:
            blocks.append(s)
            s = 0
        s = s + self.self_attn(self.input_layernorm(x), batch)
        x = self.mlp_res(blocks, s)
        return s + self.ffn(self.post_attention_layernorm(x))

    def published(self):
        """Published tensor name -> the tensor that holds it."""
        names = {"input_layernorm.weight": self.input_layernorm.weight}
        names |= {"post_attention_layernorm.weight": self.post_attention_layernorm.weight}
        names |= {f"self_attn.{n}": w for n, w in self.self_attn.published().items()}
        ffn = "block_sparse_moe" if isinstance(self.ffn, MoE) else "mlp"
        names |= {f"{ffn}.{n}": w for n, w in self.ffn.published().items()}
        for mix in ("self_attention_res", "mlp_res"):
            if getattr(self, mix) is not None:
                names |= _published_mix(mix, getattr(self, mix))
        return names


def _published_mix(name, mix):
    return {f"{name}_norm.weight": mix.norm_weight, f"{name}_proj.weight": mix.proj_weight}


class MTP(nn.Module):
    """Multi-token prediction: from h at t and the token at t+1, one more layer predicts the token at t+2 (DeepSeek-V3,
    section 2.2).

    Its embedding and head are None while they are the main model's own; a checkpoint whose copies differ brings its
    own.
    """

    def __init__(self, cfg):
        super().__init__()
        H = cfg.hidden_size
        self.enorm, self.hnorm = RMSNorm(H, cfg.rms_norm_eps), RMSNorm(H, cfg.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * H, H, bias=False)
        self.layer = DecoderLayer(cfg, cfg.num_hidden_layers, attn_res=False)
        # Shipped and kept, but not used: the MTP layer has plain residuals.
        self.inert = nn.ModuleDict(
            {n: AttnRes(cfg) for n in ("self_attention_res", "mlp_res") if cfg.attn_res_block_size}
        )
        self.norm = RMSNorm(H, cfg.rms_norm_eps)
        self.embed_tokens = self.head = None

    def forward(self, embedded, hidden, batch):
        """embedded [N, H]: embeddings of the tokens at t+1; hidden [N, H]: h at t -> x [N, H], before
        shared_head.norm.
        """
        x = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        return self.layer(x, None, batch)

    def published(self):
        """Published tensor name -> the tensor that holds it; without the copies of embedding and head."""
        names = {
            "enorm.weight": self.enorm.weight,
            "hnorm.weight": self.hnorm.weight,
            "eh_proj.weight": self.eh_proj.weight,
        }
        names |= self.layer.published() | {"shared_head.norm.weight": self.norm.weight}
        for name, mix in self.inert.items():
            names |= _published_mix(name, mix)
        return names


class K3(nn.Module):
    """A Kimi K3 language model. Build one from a config (random weights), or load one with `from_pretrained`."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, n, bool(cfg.attn_res_block_size)) for n in range(cfg.num_hidden_layers)
        )
        self.output_attn_res = AttnRes(cfg) if cfg.attn_res_block_size else None
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MTP(cfg) if cfg.num_nextn_predict_layers else None

    def hidden(self, ids, batch):
        """ids [N] int64, the tokens of all sequences in `batch` -> h [N, H], before the final norm."""
        s, blocks = self.embed_tokens(ids), []
        for layer in self.layers:
            s = layer(s, blocks, batch)
        return self.output_attn_res(blocks, s) if self.output_attn_res else s

    def logits(self, hidden):
        """h [..., H] -> logits [..., V] in float32."""
        return wide(self.lm_head(self.norm(hidden)))

    def forward(self, ids, return_hidden=False):
        """ids [B, T] int64 -> logits [B, T, V] float32, and with return_hidden h [B, T, H]. No cache; differentiable."""
        B, T = ids.shape
        hidden = self.hidden(ids.flatten(), Batch.whole(B, T)).unflatten(0, (B, T))
        return (self.logits(hidden), hidden) if return_hidden else self.logits(hidden)

    def mtp_hidden(self, ids, hidden, batch):
        """ids [N]: the token after each h; hidden [N, H] -> x [N, H], the h of the next draft step."""
        embed = self.embed_tokens if self.mtp.embed_tokens is None else self.mtp.embed_tokens
        return self.mtp(embed(ids), hidden, batch)

    def mtp_head(self, x):
        """x [..., H] of `mtp_hidden` -> logits [..., V] in float32."""
        return wide((self.lm_head if self.mtp.head is None else self.mtp.head)(self.mtp.norm(x)))

    def mtp_logits(self, ids, hidden, return_hidden=False):
        """ids [B, T], hidden [B, T, H] of `model(ids, return_hidden=True)` -> [B, T-1, V]: row t predicts ids[t+2].

        With return_hidden also x [B, T-1, H]; `mtp_logits(ids[:, 1:], x)` drafts one token further. T must be at least
        2.
        """
        if self.mtp is None:
            raise ValueError("this model has no MTP layer (num_nextn_predict_layers is 0)")
        B, T = ids.shape
        x = self.mtp_hidden(ids[:, 1:].flatten(), hidden[:, :-1].flatten(0, 1), Batch.whole(B, T - 1)).unflatten(
            0, (B, T - 1)
        )
        return (self.mtp_head(x), x) if return_hidden else self.mtp_head(x)

    def published(self):
        """Published tensor name -> the view of our weights that holds it: what is loaded and saved. Without
        `language_model.`.
        """
        names = {"model.embed_tokens.weight": self.embed_tokens.weight, "model.norm.weight": self.norm.weight}
        if not self.cfg.tie_word_embeddings:
            names["lm_head.weight"] = self.lm_head.weight
        if self.output_attn_res is not None:
            names |= {f"model.{n}": w for n, w in _published_mix("output_attn_res", self.output_attn_res).items()}
        for n, layer in enumerate([*self.layers, *([self.mtp] if self.mtp else [])]):
            names |= {f"model.layers.{n}.{name}": w for name, w in layer.published().items()}
        return names

    def decoder_layers(self):
        """(published prefix, layer) of every decoder layer, the MTP layer's last."""
        layers = [*self.layers, *([self.mtp.layer] if self.mtp else [])]
        return [(f"model.layers.{n}.", layer) for n, layer in enumerate(layers)]

    def expert_stacks(self):
        """(published prefix, Experts) of every MoE layer, the MTP layer's last."""
        moe = [(prefix, layer.ffn) for prefix, layer in self.decoder_layers() if isinstance(layer.ffn, MoE)]
        return [(f"{prefix}block_sparse_moe.experts.", ffn.experts) for prefix, ffn in moe]

    @classmethod
    def from_pretrained(cls, path, dtype=torch.bfloat16, device="cpu", progress=True):
        """Loads a checkpoint folder (config.json, safetensors). Raises ValueError or OSError in one line; nothing is
        half-loaded.

        dtype: of the weights; A_log, dt_bias, convolutions, o_norm and the router's bias stay float32; packed experts
        stay packed.
        """
        cfg = K3Config.from_json(path)
        default = torch.get_default_dtype()
        torch.set_default_dtype(dtype)
        try:
            with torch.device("meta"):
                model = cls(cfg)
            return checkpoint.load(model, path, device, progress).eval()
        finally:
            torch.set_default_dtype(default)

    def save_pretrained(self, path, mxfp4=None, mtp_copies=True, max_shard_bytes=5 << 30):
        """Writes config.json and safetensors in the published layout.

        mxfp4: True packs the routed experts, False writes them plain, None leaves them as they are held.
        mtp_copies: also write the MTP layer's copies of embedding and head, as published checkpoints do.
        """
        checkpoint.save(self, path, mxfp4, mtp_copies, max_shard_bytes)
