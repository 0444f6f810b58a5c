"""The model against the reference cases; the released K3 by name, shape and size; configurations taken and refused."""

import json

import pytest
import torch
from helpers import CASES, DATA, case, norm64, rel, tiny_config, tiny_model

from attnres import attnres_mix
from cache import Batch
from checkpoint import tensors_to_write
from kda import kda
from model import K3, K3Config
from moe import in_projection

# ---------------------------------------------------------------- reference cases


def trace(model, ids):
    """logits, hidden and s after each layer of one sequence ids [T]."""
    states = []
    hooks = [layer.register_forward_hook(lambda layer, args, out: states.append(sum(out))) for layer in model.layers]
    with torch.no_grad():
        logits, hidden = model(ids[None], return_hidden=True)
    for hook in hooks:
        hook.remove()
    return logits[0], hidden[0], torch.stack(states)


def check_against_reference(model, want, limit):
    logits, hidden, states = trace(model, want["input_ids"])
    assert rel(logits, want["logits"]) < limit
    assert rel(hidden, want["hidden_before_final_norm"]) < limit
    for state, expected in zip(states, want["layer_outputs"], strict=True):
        assert rel(state, expected) < limit
    if "mtp_logits" in want:
        with torch.no_grad():
            logits, x = model.mtp_logits(want["input_ids"][None], hidden[None], return_hidden=True)
        assert rel(logits[0], want["mtp_logits"]) < limit and rel(x[0], want["mtp_hidden"]) < limit
    else:
        assert model.mtp is None


@pytest.mark.parametrize("name", CASES)
def test_float32(name):
    model, want = case(name)
    check_against_reference(model, want, 1e-5)
    assert model(want["input_ids"][None]).dtype == torch.float32


@pytest.mark.parametrize("name", CASES)
def test_float64(name):
    """All that is left is the reference's own rounding to float32."""
    model = K3.from_pretrained(DATA / name, dtype=torch.float64, progress=False)
    check_against_reference(model, case(name)[1], 1e-7)
    assert all(p.dtype == torch.float64 for p in model.parameters())


def test_mtp_reference_is_there():
    assert "mtp_logits" in case("micro-mtp")[1] and case("micro-mtp")[0].mtp is not None


@pytest.mark.parametrize("name", [CASES[0], CASES[3], *(pytest.param(n, marks=pytest.mark.slow) for n in CASES[1:3])])
def test_greedy(name):
    model, want = case(name)
    ids = want["greedy_from_20"][:20]
    assert torch.equal(ids, want["input_ids"][:20])
    while len(ids) < 60:
        with torch.no_grad():
            ids = torch.cat([ids, model(ids[None])[0, -1:].argmax(-1)])
    assert torch.equal(ids, want["greedy_from_20"])


@pytest.mark.parametrize("name", CASES)
def test_bf16_layer_by_layer(name):
    """Each layer from the exact state before it: whole runs cannot be compared, a routing tie flips."""
    model, want = K3.from_pretrained(DATA / name, progress=False), case(name)[1]
    exact = [case(name)[0].embed_tokens.weight[want["input_ids"]], *want["layer_outputs"]]
    size = model.cfg.attn_res_block_size
    for n, layer in enumerate(model.layers):
        blocks = [s.bfloat16() for s in exact[:n:size]] if size else []
        with torch.no_grad():
            got = sum(layer(exact[n].bfloat16(), None, blocks, Batch.whole(1, len(exact[n]))))
        assert got.dtype == torch.bfloat16
        error = (got.double() - exact[n + 1]).norm(dim=-1) / exact[n + 1].norm(dim=-1)
        assert error.median() < 1e-2 and (error > 5e-2).sum() <= 8, n


@pytest.mark.parametrize("name", CASES)
def test_bf16_whole_model_is_finite(name):
    model, want = K3.from_pretrained(DATA / name, progress=False), case(name)[1]
    logits, hidden, states = trace(model, want["input_ids"])
    assert logits.dtype == torch.float32 and states.dtype == torch.bfloat16
    assert logits.isfinite().all() and rel(logits, want["logits"]) < 0.6


@pytest.mark.parametrize("name", CASES)
def test_batch_rows_are_independent(name):
    model, want = case(name)
    ids = want["input_ids"][:60].view(3, 20)
    with torch.no_grad():
        together = model(ids)
        for row, alone in zip(together, ids):
            assert rel(row, model(alone[None])[0]) < 1e-5
        assert rel(model(ids[:, :7]), together[:, :7]) < 1e-5  # causal


def test_mtp_rows_and_further_drafts():
    """Row t of mtp_logits depends on ids <= t+1; the next step takes x for h and the next token."""
    model, want = case("micro-mtp")
    ids = want["input_ids"][None, :20]
    with torch.no_grad():
        _, hidden = model(ids, return_hidden=True)
        logits, x = model.mtp_logits(ids, hidden, return_hidden=True)
        assert logits.shape == (1, 19, 257) and x.shape == (1, 19, 96)
        assert rel(model.mtp_logits(ids[:, :9], hidden[:, :9]), logits[:, :8]) < 1e-5
        again = model.mtp_logits(ids[:, 1:], x)
        by_hand = model.mtp_head(model.mtp_hidden(ids[0, 2:], x[0, :-1], Batch.whole(1, 18)))
        assert rel(again[0], by_hand) < 1e-6
        pair = model.mtp_logits(ids.expand(2, -1), hidden.expand(2, -1, -1))
        assert rel(pair[1], logits[0]) < 1e-5


def test_mtp_logits_without_mtp():
    model, want = case("micro")
    with pytest.raises(ValueError, match="no MTP layer"):
        model.mtp_logits(want["input_ids"][None], want["hidden_before_final_norm"][None])


# ---------------------------------------------------------------- other configurations

KIMI_LINEAR = dict(model_type="kimi_linear", hidden_act="silu", attn_res_block_size=None, q_lora_rank=None)
KIMI_LINEAR |= dict(routed_expert_hidden_size=None, latent_moe_use_norm=False, mla_use_output_gate=False)
KIMI_LINEAR |= dict(linear=dict(use_full_rank_gate=False, gate_lower_bound=None), num_nextn_predict_layers=1)

VARIANTS = {
    "k3": dict(num_nextn_predict_layers=1),
    "kimi-linear with MTP": KIMI_LINEAR,
    "tied": dict(tie_word_embeddings=True),
    "grouped": dict(num_expert_group=3, topk_group=2),
    "softmax": dict(moe_router_activation_func="softmax", moe_renormalize=False),
    "every second MoE": dict(moe_layer_freq=2, first_k_dense_replace=2),
    "all MoE": dict(first_k_dense_replace=0),
    "no MoE": dict(num_experts=0),
    "no shared expert": dict(num_shared_experts=0),
    "all KDA": dict(linear=dict(kda_layers=[1, 2, 3, 4, 5], full_attn_layers=[])),
    "all MLA": dict(linear=dict(kda_layers=[], full_attn_layers=[5, 3, 1, 2, 4])),
    "short convolution of 2": dict(linear=dict(short_conv_kernel_size=2)),
}


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_every_used_parameter_gets_a_finite_gradient(name):
    model = tiny_model(torch.float64, **VARIANTS[name])
    ids = torch.randint(61, (2, 70), generator=torch.Generator().manual_seed(0))
    logits, hidden = model(ids, return_hidden=True)
    assert logits.shape == (2, 70, 61) and logits.dtype == torch.float64
    loss = logits.log_softmax(-1)[:, :-1].gather(-1, ids[:, 1:, None]).mean()
    if model.mtp:
        loss = loss + model.mtp_logits(ids, hidden)[:, :-1].log_softmax(-1).gather(-1, ids[:, 2:, None]).mean()
    loss.backward()
    # Layer 0 mixes nothing, the MTP layer's AttnRes is inert, and zero-sized weights have no gradient to speak of.
    unused = ("layers.0.self_attention_res.", "mtp.inert.")
    for name, p in model.named_parameters():
        if name.startswith(unused) or name.endswith("e_score_correction_bias") or not p.numel():
            assert p.grad is None or not p.grad.any()
        else:
            assert p.grad is not None and p.grad.isfinite().all() and p.grad.any(), name


def test_gradient_is_the_slope():
    """A step along the gradient changes the loss as much as the gradient says."""
    model = tiny_model(torch.float64)
    ids = torch.arange(20)[None]
    loss = model(ids).square().mean()
    params = [p for p in model.parameters() if p.requires_grad]
    grads = torch.autograd.grad(loss, params, allow_unused=True)
    slope = sum(float(g.square().sum()) for g in grads if g is not None)
    step = 1e-6 / slope
    with torch.no_grad():
        for p, g in zip(params, grads):
            p += 0 if g is None else step * g
    assert float((model(ids).square().mean() - loss).detach()) == pytest.approx(step * slope, rel=1e-3)


def test_autocast_leaves_statistics_and_states_alone():
    """Training runs under bf16 autocast: router, mixtures and recurrence must not notice, the rest comes close."""
    model, x = tiny_model(), torch.randn(70, 48)
    layer, ids = model.layers[1], torch.arange(60)[None]
    (q, k, v, g), state = torch.randn(4, 1, 70, 3, 20) / 20, torch.randn(1, 3, 20, 20)
    gate, rows = layer.ffn.gate, layer.ffn.in_proj.weight
    parts = [lambda: gate(in_projection(x, rows, 6)[0])]
    parts += [lambda: (attnres_mix([x.flip(0), x], *layer.mlp_res.weights()),)]
    parts += [lambda: kda(q, k, v, -g.abs(), g[..., 0].sigmoid(), state)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside, logits = [part() for part in parts], model(ids)
    for part, got in zip(parts, inside):
        assert all(torch.equal(*pair) for pair in zip(part(), got, strict=True))
    assert logits.dtype == torch.float32 and 1e-4 < rel(logits, model(ids)) < 0.1
    logits.square().mean().backward()
    assert all(p.grad is None or p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


def test_tied_embeddings():
    model = tiny_model(tie_word_embeddings=True)
    assert model.lm_head.weight is model.embed_tokens.weight
    logits, hidden = model(torch.arange(9)[None], return_hidden=True)
    want = norm64(hidden.double(), model.norm.weight.double(), 1e-5) @ model.embed_tokens.weight.double().T
    assert rel(logits, want) < 1e-6
    assert "lm_head.weight" not in model.published()


def test_which_layers_are_what():
    cfg = tiny_config(num_hidden_layers=8, first_k_dense_replace=3, moe_layer_freq=2, linear=LAYERS_OF_8)
    model = K3(cfg)
    assert [type(layer.self_attn).__name__ for layer in model.layers] == ["KDA"] * 3 + ["MLA"] + ["KDA"] * 3 + ["MLA"]
    assert [type(layer.ffn).__name__ for layer in model.layers] == ["MLP"] * 4 + ["MoE", "MLP", "MoE", "MLP"]
    assert [layer.self_attn.index for layer in model.layers] == [0, 1, 2, 0, 3, 4, 5, 1]
    assert cfg.kda_layers == [0, 1, 2, 4, 5, 6] and cfg.mla_layers == [3, 7]


LAYERS_OF_8 = dict(kda_layers=[7, 6, 5, 3, 2, 1], full_attn_layers=[8, 4])  # the order in the lists does not matter


def test_the_eps_of_every_norm():
    model = tiny_model(rms_norm_eps=3e-3, num_nextn_predict_layers=1)
    norms = {name: module.eps for name, module in model.named_modules() if hasattr(module, "eps")}
    latent = {name for name in norms if name.endswith(("q_a_layernorm", "kv_a_layernorm"))}
    assert len(latent) == 6 and len(norms) == 43
    assert all(eps == (1e-6 if name in latent else 3e-3) for name, eps in norms.items())


# ---------------------------------------------------------------- the released K3

ALL, MLA = range(93), [*range(3, 92, 4), 92]
KDA, MOE = [n for n in ALL if n not in MLA], range(1, 93)
FP32 = ("conv1d.weight", "A_log", "dt_bias", "o_norm.weight", "e_score_correction_bias")
SPEC = [  # section 6: layers, names, shape
    (None, "model.embed_tokens.weight lm_head.weight", (163840, 7168)),
    (None, "model.norm.weight model.output_attn_res_norm.weight", (7168,)),
    (None, "model.output_attn_res_proj.weight", (1, 7168)),
    (ALL, "input_layernorm.weight post_attention_layernorm.weight", (7168,)),
    (ALL, "self_attention_res_norm.weight mlp_res_norm.weight", (7168,)),
    (ALL, "self_attention_res_proj.weight mlp_res_proj.weight", (1, 7168)),
    (KDA, " ".join(f"self_attn.{x}_proj.weight" for x in "qkvg"), (12288, 7168)),
    (KDA, "self_attn.o_proj.weight", (7168, 12288)),
    (KDA, " ".join(f"self_attn.{x}_conv1d.weight" for x in "qkv"), (12288, 1, 4)),
    (KDA, "self_attn.f_a_proj.weight", (128, 7168)),
    (KDA, "self_attn.f_b_proj.weight", (12288, 128)),
    (KDA, "self_attn.b_proj.weight", (96, 7168)),
    (KDA, "self_attn.A_log self_attn.o_norm.weight", (128,)),
    (KDA, "self_attn.dt_bias", (12288,)),
    (MLA, "self_attn.q_a_proj.weight", (1536, 7168)),
    (MLA, "self_attn.q_a_layernorm.weight", (1536,)),
    (MLA, "self_attn.q_b_proj.weight", (18432, 1536)),
    (MLA, "self_attn.kv_a_proj_with_mqa.weight", (576, 7168)),
    (MLA, "self_attn.kv_a_layernorm.weight", (512,)),
    (MLA, "self_attn.kv_b_proj.weight", (24576, 512)),
    (MLA, "self_attn.g_proj.weight", (12288, 7168)),
    (MLA, "self_attn.o_proj.weight", (7168, 12288)),
    ([0], "mlp.gate_proj.weight mlp.up_proj.weight", (33792, 7168)),
    ([0], "mlp.down_proj.weight", (7168, 33792)),
    (MOE, "block_sparse_moe.gate.weight", (896, 7168)),
    (MOE, "block_sparse_moe.gate.e_score_correction_bias", (896,)),
    (MOE, "block_sparse_moe.routed_expert_down_proj.weight", (3584, 7168)),
    (MOE, "block_sparse_moe.routed_expert_norm.weight", (3584,)),
    (MOE, "block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584)),
    (MOE, " ".join(f"block_sparse_moe.shared_experts.{x}_proj.weight" for x in ("gate", "up")), (6144, 7168)),
    (MOE, "block_sparse_moe.shared_experts.down_proj.weight", (7168, 6144)),
    (MOE, " ".join(f"block_sparse_moe.experts.{e}.{w}.weight" for e in range(896) for w in ("w1", "w3")), (3072, 3584)),
    (MOE, " ".join(f"block_sparse_moe.experts.{e}.w2.weight" for e in range(896)), (3584, 3072)),
]


@pytest.fixture(scope="module")
def k3():
    """The model on the meta device, and what saving it would write."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.no_grad():
            model = K3(K3Config.k3())
            return model, dict(tensors_to_write(model))
    finally:
        torch.set_default_dtype(torch.float32)


def test_k3_parameter_counts(k3):
    total = sum(t.numel() for t in k3[1].values())
    assert total == pytest.approx(2_779_484_476_000, rel=1e-4)
    assert total - 69 * (128 - 96) == 2_779_484_476_000  # without the padding of A_log
    unused = 163840 * 7168 + 92 * (896 - 16) * 3 * 3584 * 3072  # the embedding, and the experts not chosen
    assert (total - unused) / 1e9 == pytest.approx(104, abs=0.5)


def test_k3_names_shapes_and_dtypes(k3):
    want = {}
    for layers, names, shape in SPEC:
        prefixes = [""] if layers is None else [f"model.layers.{n}." for n in layers]
        want |= {f"language_model.{prefix}{name}": shape for prefix in prefixes for name in names.split()}
    assert {name: tuple(t.shape) for name, t in k3[1].items()} == want
    for name, t in k3[1].items():
        assert t.dtype == (torch.float32 if name.endswith(FP32) else torch.bfloat16), name


def test_k3_bytes_with_packed_experts(k3):
    model, plain = k3
    packed = 0
    for _, experts in model.expert_stacks():
        for name in ("w13", "w2"):
            E, rows, width = getattr(experts, name).shape
            shapes = (E, rows, width // 2), (E, rows, width // 32)
            experts.set_packed(name, *(torch.empty(shape, dtype=torch.uint8, device="meta") for shape in shapes))
        packed += sum(t.nbytes for t in [*experts.buffers(), *experts.parameters()])
    assert packed == 92 * 896 * 3 * 3584 * 3072 * (1 / 2 + 1 / 32)
    others = 1_560_936_091_448 - packed - sum(t.nbytes for name, t in plain.items() if ".experts." not in name)
    assert 0 < others < 1.1e9  # headers and the other towers


def test_k3_configuration():
    cfg = K3Config.k3()
    assert cfg.mla_layers == MLA and cfg.kda_layers == KDA and len(KDA) == 69
    assert (cfg.kda_heads, cfg.kda_head_dim, cfg.conv_kernel, cfg.gate_lower_bound) == (96, 128, 4, -5.0)
    assert cfg.use_full_rank_gate and cfg.wrapped and cfg.eos_ids == {163586}


# ---------------------------------------------------------------- configurations


def config_file(tmp_path, change=None, name="micro"):
    """The config of a reference case, with change(text config, whole file) applied -> its path."""
    top = json.loads((DATA / name / "config.json").read_text())
    text = top.get("text_config", top)
    top = (change and change(text, top)) or top
    path = tmp_path / "config.json"
    path.write_text(json.dumps(top))
    return path


@pytest.mark.parametrize("name", CASES)
def test_config_of_a_folder_or_file(name):
    cfg = K3Config.from_json(DATA / name)
    assert cfg == K3Config.from_json(str(DATA / name / "config.json"))
    assert cfg.wrapped == (name != "kimi-linear-micro")
    top = json.loads((DATA / name / "config.json").read_text())
    text = top.get("text_config", top)
    for field in set(text) - {"num_key_value_heads", "quantization_config", "model_type", "architectures"}:
        value = getattr(cfg, field)
        assert value == text[field] and type(value) is type(text[field]), field


@pytest.mark.parametrize("name", CASES)
def test_config_comes_back(tmp_path, name):
    cfg = K3Config.from_json(DATA / name)
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_json()))
    assert K3Config.from_json(tmp_path) == cfg


@pytest.mark.parametrize("more", [{}, {"text_config": None}])
def test_flat_is_wrapped_but_for_the_prefix(tmp_path, more):
    want = K3Config.from_json(DATA / "micro")
    cfg = K3Config.from_json(config_file(tmp_path, lambda text, top: text | more))
    assert not cfg.wrapped and want.wrapped
    cfg.model_type = want.model_type
    assert cfg == want


IDS = [  # eos_token_id of text_config, of the top level, of generation_config.json; the ids that end a text
    (2, 5, None, {2}),
    (None, 5, None, {5}),
    (None, [5, 6], None, {5, 6}),
    (2, None, 7, {2, 7}),
    ([2, 3], None, [3, 7, 8], {2, 3, 7, 8}),
    (None, 5, [7], {5, 7}),
    (None, None, 7, {7}),
    (None, None, None, set()),
]


@pytest.mark.parametrize("text_id, outer, generation, ids", IDS)
def test_end_ids_are_found_everywhere(tmp_path, text_id, outer, generation, ids):  # field note 20
    def change(text, top):
        text["eos_token_id"], top["eos_token_id"] = text_id, outer

    config_file(tmp_path, change)
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    cfg = K3Config.from_json(tmp_path)
    assert cfg.eos_ids == ids
    (tmp_path / "config.json").write_text(json.dumps(cfg.to_json()))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    assert K3Config.from_json(tmp_path).eos_ids == ids


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, "x"]}', b"\xff"])
def test_a_malformed_generation_config(tmp_path, text):
    config_file(tmp_path)
    file = tmp_path / "generation_config.json"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError, match="generation_config.json: ") as e:
        K3Config.from_json(tmp_path)
    assert str(file) in str(e.value) and "\n" not in str(e.value)


def test_fields_at_the_top_level(tmp_path):
    """Where text_config has none; what it has is stronger."""
    outer = dict(tie_word_embeddings=True, bos_token_id=11, pad_token_id=12)

    def moved(text, top):
        [text.pop(name) for name in outer]
        top.update(outer)

    cfg = K3Config.from_json(config_file(tmp_path, moved))
    assert (cfg.tie_word_embeddings, cfg.bos_token_id, cfg.pad_token_id) == (True, 11, 12)
    cfg = K3Config.from_json(config_file(tmp_path, lambda text, top: top.update(outer)))
    assert (cfg.tie_word_embeddings, cfg.bos_token_id, cfg.pad_token_id) == (False, 1, 0)


def test_model_max_length(tmp_path):
    def change(own):
        def only(text, top):
            text["max_position_embeddings"], text["model_max_length"] = own, 777

        return only

    for own, most in ((None, 777), (4096, 4096)):
        cfg = K3Config.from_json(config_file(tmp_path, change(own), "kimi-linear-micro"))
        assert cfg.max_position_embeddings == most


OFF = dict(q_lora_rank=None, routed_expert_hidden_size=None, attn_res_block_size=None, num_nextn_predict_layers=0)
OFF |= dict(mla_use_output_gate=False, latent_moe_use_norm=False, moe_renormalize=False, tie_word_embeddings=False)
OFF |= dict(num_experts=0, num_shared_experts=0, first_k_dense_replace=0, use_grouped_topk=False)
OFF |= dict(moe_layer_freq=1, num_expert_group=1, topk_group=1, routed_scaling_factor=1.0)


@pytest.mark.parametrize("field", OFF)
@pytest.mark.filterwarnings("ignore:Initializing zero-element")
def test_absent_null_and_false_mean_off(tmp_path, field):
    def absent(text, top):
        text.pop(field)

    def null(text, top):
        text[field] = None

    def false(text, top):
        text[field] = False

    for change in (absent, null, false):
        cfg = K3Config.from_json(config_file(tmp_path, change, "micro-mtp"))
        assert (getattr(cfg, field) or None) == (OFF[field] or None), change.__name__
        with torch.device("meta"):
            K3(cfg)


@pytest.mark.parametrize("field", ["use_full_rank_gate", "gate_lower_bound"])
@pytest.mark.parametrize("value", ["absent", None, False])
def test_off_in_linear_attn_config(tmp_path, field, value):
    def change(text, top):
        text["linear_attn_config"][field] = value
        if value == "absent":
            del text["linear_attn_config"][field]

    assert not getattr(K3Config.from_json(config_file(tmp_path, change)), field)


@pytest.mark.parametrize("at", ["text", "top"])
@pytest.mark.parametrize("value", [None, False, {}])
def test_quantization_may_be_off(tmp_path, at, value):
    def change(text, top):
        (text if at == "text" else top)["quantization_config"] = value

    assert K3Config.from_json(config_file(tmp_path, change)) == K3Config.from_json(DATA / "micro")


def linear(**changes):
    return {
        "linear_attn_config": json.loads((DATA / "micro/config.json").read_text())["text_config"]["linear_attn_config"]
        | changes
    }


REFUSED = [  # changes, what the message names
    ({"mla_use_nope": False}, "mla_use_nope"),
    ({"mla_use_nope": None}, "mla_use_nope"),
    ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    ({"moe_router_activation_func": "tanh"}, "moe_router_activation_func 'tanh'"),
    ({"topk_method": "greedy"}, "topk_method 'greedy'"),
    ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2"),
    ({"num_hidden_layers": 10}, "kda_layers and full_attn_layers .* 1..10"),
    (linear(kda_layers=[1, 2, 3, 5, 6]), "kda_layers and full_attn_layers"),
    (linear(kda_layers=[1, 2, 3, 4, 5, 6, 7]), "kda_layers and full_attn_layers"),
    (linear(kda_layers=[0, 1, 2, 4, 5, 6], full_attn_layers=[3, 7, 8]), "kda_layers and full_attn_layers"),
    (linear(kda_layers=None), "linear_attn_config has no kda_layers"),
    (linear(head_dim=None, num_heads=None), "linear_attn_config has no num_heads, head_dim"),
    ({"num_experts_per_token": 9}, "num_experts_per_token 9"),
    ({"num_experts_per_token": None}, "num_experts_per_token"),
    ({"moe_intermediate_size": None}, "moe_intermediate_size"),
    ({"num_expert_group": 3}, "num_expert_group 3"),
    ({"num_expert_group": 2, "topk_group": 3}, "topk_group 3"),
    ({"quantization_config": {"quant_method": "gptq", "format": "x"}}, "gptq"),
    ({"quantization_config": {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}}, "nvfp4"),
    ({"quantization_config": "mxfp4"}, "mxfp4"),
    ({"num_expert_group": 4, "topk_group": 1}, "num_experts_per_token 3"),  # the one group kept has 2 experts
    ({"linear_attn_config": "all"}, "linear_attn_config"),
    (linear(kda_layers="1235679"), "kda_layers"),
    ({"hidden_size": "96"}, "hidden_size"),
    ({"eos_token_id": [2, "x"]}, "eos_token_id"),
]
FIELDS = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "hidden_act", "num_attention_heads"]
FIELDS += ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "linear_attn_config"]
REFUSED += [({field: None}, field) for field in FIELDS]


@pytest.mark.parametrize(
    "changes, named", REFUSED, ids=[named.split()[0] + str(i) for i, (_, named) in enumerate(REFUSED)]
)
def test_refused(tmp_path, changes, named):
    path = config_file(tmp_path, lambda text, top: text.update(changes))
    with pytest.raises(ValueError, match=named) as e:
        K3Config.from_json(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


def test_refused_quantization_at_the_top_level(tmp_path):
    path = config_file(tmp_path, lambda text, top: top.update(quantization_config={"quant_method": "fp8"}))
    with pytest.raises(ValueError, match="fp8"):
        K3Config.from_json(path)


def test_all_missing_fields_are_named(tmp_path):
    path = config_file(tmp_path, lambda text, top: {"model_type": "llama", "hidden_size": 64})
    with pytest.raises(ValueError, match="num_hidden_layers") as e:
        K3Config.from_json(path)
    assert all(field in str(e.value) for field in FIELDS if field != "hidden_size")


@pytest.mark.parametrize("text", ["", "{", "[1, 2]", '"kimi"', "null", '{"text_config": 3}', b"\xff\xfe{}"])
def test_bad_json(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ValueError) as e:
        K3Config.from_json(path)
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("where", [".", "config.json", "nowhere"])
def test_no_config(tmp_path, where):
    with pytest.raises(FileNotFoundError, match="no config.json"):
        K3Config.from_json(tmp_path / where)


def test_constructor_refuses_too():
    with pytest.raises(ValueError, match="hidden_act 'relu'"):
        tiny_config(hidden_act="relu")
