"""Kimi K3, the whole model: decoder layer, K3, and the multi-token prediction (MTP) head. Its sizes: config.py.

    s = embed(ids)
    for each layer:  x = mixture of the block snapshots and s  (attnres.py)
                     s = s + KDA or MLA (RMSNorm(x));   x = mixture;   s = s + MoE or MLP (RMSNorm(x))
    h = mixture over all snapshots and s;   logits = lm_head(RMSNorm(h))

A sub-layer's output y is added to s where the next one begins, in the same op as the mixture and the norm.

Three of four layers are KDA (kda.py), every fourth and the last are MLA (mla.py); all but the first feed-forward layer
are MoE (moe.py). Kimi-Linear is the same model with parts switched off by config.
"""

import torch
from torch import nn

import checkpoint
from attnres import AttnRes, residual
from cache import Batch
from config import K3Config
from kda import KDA
from layers import Linear, RMSNorm, randn, wide
from mla import MLA
from moe import MLP, MoE


class DecoderLayer(nn.Module):
    """Attention and feed-forward around the residual stream: with AttnRes, or plain pre-norm without it."""

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

    def forward(self, s, y, blocks, batch):
        """s [N, H]: running sum; y [N, H] or None: what is still to be added to it; blocks: snapshots, to which a layer
        at a block start appends -> s, y."""
        s, x = residual(s, y, blocks, self.self_attention_res, self.input_layernorm)
        if self.starts_block:
            blocks.append(s)
            s = None  # a new sum starts
        y = self.self_attn(x, batch)
        s, x = residual(s, y, blocks, self.mlp_res, self.post_attention_layernorm)
        return s, self.ffn(x)

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
        self.eh_proj = Linear(2 * H, H)
        self.layer = DecoderLayer(cfg, cfg.num_hidden_layers, attn_res=False)
        # Shipped and kept, but not used: the MTP layer has plain residuals.
        self.inert = nn.ModuleDict(
            {n: AttnRes(cfg) for n in ("self_attention_res", "mlp_res") if cfg.attn_res_block_size}
        )
        self.norm = RMSNorm(H, cfg.rms_norm_eps)
        self.embed_tokens = self.head = None

    def forward(self, embedded, hidden, batch):
        """embedded [N, H]: the tokens at t+1; hidden [N, H]: h at t -> x [N, H], before shared_head.norm."""
        s, y = self.layer(self.join(embedded, hidden), None, [], batch)
        return s + y

    def join(self, embedded, hidden):
        return self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))

    def store(self, embedded, hidden, pool, slots):
        """Writes the latent rows of `forward` to slots [N], and computes nothing else."""
        x = self.layer.input_layernorm(self.join(embedded, hidden))
        self.layer.self_attn.store(x, pool, slots)

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
        size = cfg.vocab_size, cfg.hidden_size
        self.embed_tokens = nn.Embedding(*size, _weight=randn(*size))
        self.layers = nn.ModuleList(
            DecoderLayer(cfg, n, bool(cfg.attn_res_block_size)) for n in range(cfg.num_hidden_layers)
        )
        self.output_attn_res = AttnRes(cfg) if cfg.attn_res_block_size else None
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_norm_eps)
        self.lm_head = Linear(cfg.hidden_size, cfg.vocab_size)
        if cfg.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.mtp = MTP(cfg) if cfg.num_nextn_predict_layers else None

    def hidden(self, ids, batch):
        """ids [N] int64, the tokens of all sequences in `batch` -> h [N, H], before the final norm."""
        s, y, blocks = self.embed_tokens(ids), None, []
        for layer in self.layers:
            s, y = layer(s, y, blocks, batch)
        return residual(s, y, blocks, self.output_attn_res, None)[1]

    def logits(self, hidden):
        """h [..., H] -> logits [..., V] in float32."""
        return wide(self.lm_head(self.norm(hidden)))

    def forward(self, ids, return_hidden=False):
        """ids [B, T] -> logits [B, T, V] float32, with return_hidden also h [B, T, H]. No cache, differentiable."""
        if ids.ndim != 2 or not ids.numel():
            raise ValueError(f"ids must be [B, T] with at least one token, not {list(ids.shape)}")
        B, T = ids.shape
        hidden = self.hidden(ids.flatten(), Batch.whole(B, T)).unflatten(0, (B, T))
        return (self.logits(hidden), hidden) if return_hidden else self.logits(hidden)

    def mtp_embed(self, ids):
        return (self.embed_tokens if self.mtp.embed_tokens is None else self.mtp.embed_tokens)(ids)

    def mtp_hidden(self, ids, hidden, batch):
        """ids [N]: the token after each h; hidden [N, H] -> x [N, H], the h of the next draft step."""
        return self.mtp(self.mtp_embed(ids), hidden, batch)

    def mtp_rows(self, ids, hidden, pool, slots):
        """Writes only the latent rows of `mtp_hidden`, to slots [N] int64 of the pool; below 0: not."""
        self.mtp.store(self.mtp_embed(ids), hidden, pool, slots)

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
        if T < 2:
            raise ValueError(
                f"mtp_logits needs at least 2 tokens, not {T}: a row reads h of one and the id of the next"
            )
        x = self.mtp_hidden(ids[:, 1:].flatten(), hidden[:, :-1].flatten(0, 1), Batch.whole(B, T - 1)).unflatten(
            0, (B, T - 1)
        )
        return (self.mtp_head(x), x) if return_hidden else self.mtp_head(x)

    def published(self):
        """Published tensor name (without `language_model.`) -> the view of our weights: what is loaded and saved.
        A mapping that makes each view when it is asked for (checkpoint.Views)."""
        names = {"model.embed_tokens.weight": self.embed_tokens.weight, "model.norm.weight": self.norm.weight}
        if not self.cfg.tie_word_embeddings:
            names["lm_head.weight"] = self.lm_head.weight
        if self.output_attn_res is not None:
            names |= {f"model.{n}": w for n, w in _published_mix("output_attn_res", self.output_attn_res).items()}
        for n, layer in enumerate([*self.layers, *([self.mtp] if self.mtp else [])]):
            names |= {f"model.layers.{n}.{name}": w for name, w in layer.published().items()}
        return checkpoint.Views(names)

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
