"""Trains a small Kimi K3 from text files, and measures one.

    python train.py --data train.txt --val val.txt    writes out/: config.json, safetensors, tokenizer.json, README.md
    python train.py --resume --out out                goes on from out/train.pt, with its settings
    python evaluate.py out --val val.txt              bits per byte; tokens per cycle of draft and verify

Parts of a run: the main model learns; then its experts are trained as the MXFP4 they will be stored in, while the
learning rate falls to 0; then it is frozen, and the MTP layer learns to say what it would say. So nothing is left to
quantize or to distill at the end. On a GPU a step is one CUDA graph, and the larger ops are compiled.
"""

import argparse
import functools
import json
import math
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path

import tokenizers
import torch
import torch.nn.functional as F
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn.utils import parametrize
from tqdm import tqdm

import kernels
import moe
from engine import Engine, SamplingParams
from evaluate import PARAGRAPH, bits_per_byte, encode, evaluate, read
from model import K3, K3Config
from optim import Graphed, fast_ops, make_optimizers, quantize
from tokenizer import CONTROL_SLOTS, SPLIT_PATTERN, Tokenizer

# ---------------------------------------------------------------- settings: each is a flag too, as --quant-from
DATA = []  # text files to train on
VAL = []  # held-out text files, never trained on
OUT = "out"  # folder to write
RESUME = False  # go on from train.pt in the out folder
INIT = ""  # a checkpoint folder to start from: its sizes, weights and tokenizer
SOURCES = ""  # text file that lists where the data comes from, copied into the model card
CARD_DATA = ""  # a sentence about the data, for the model card
STEPS = 400  # optimizer steps
BATCH = 64  # sequences a step
SEQ = 512  # tokens a sequence
LR = 5e-3  # peak learning rate of Muon, for matrices
ADAM_LR = 4e-3  # and of AdamW, for the rest: the embedding, the head, norms, gates, convolutions
WARMUP = 60  # steps up to the peak
DECAY = 0.4  # last fraction of the main model's steps, in which the rate falls linearly to 0
WEIGHT_DECAY = 0.1  # of matrices; norms, biases, gates, convolutions and the embedding have none
DROPOUT = 0.1  # of what each attention and feed-forward layer adds, while the main model learns: small texts over-fit
CLIP = 1.0  # largest norm of the gradient
BIAS_RATE = 1e-3  # by how much a step moves the router bias of an expert that is used too much or too little
QUANT_FROM = 0.7  # fraction of the steps after which experts are rounded to MXFP4 in every forward pass
DRAFT_STEPS = 3  # how many tokens the MTP layer learns to draft in a chain; 0: no MTP layer
MTP_DISTILL = True  # its targets are the main model's distributions, not the text: drafts count when that model agrees
MTP_ONLY = 0.25  # last fraction of the steps, in which the main model is frozen and the MTP layer learns
OWN_TEXT = 0  # passages that the checkpoint of INIT goes on with, greedily; then half of what the MTP layer reads
MTP_LR = 5e-3  # learning rate of Muon at the start of that part, falling linearly to 0; AdamW's in proportion
SEED = 1337  # of the weights and of the order of the data
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # where to train and to measure
DTYPE = "auto"  # of matrix products in training: bfloat16 on cuda, float32 elsewhere; weights are float32 always
MINUTES = 0.0  # save and stop after so many minutes, to be resumed; 0: no limit
LOG_EVERY = 20  # steps between two rows of history.json
EVAL_EVERY = 250  # steps between two measurements of held-out text (its first 64 SEQ tokens; at the end all)
SAVE_EVERY = 500  # steps between two writes of train.pt
EVAL_PROMPTS = 64  # held-out prompts of 128 tokens, continued by 64, that give tokens per cycle
BPE_SIZE = 1792  # byte-level BPE tokens; 256 control slots come on top
# The model, under the names of config.json; flags too. Every fourth layer and the last are MLA, as in K3.
MODEL = {"hidden_size": 192, "num_hidden_layers": 9, "attn_res_block_size": 3, "intermediate_size": 576}
MODEL |= {"num_attention_heads": 4, "q_lora_rank": 96, "kv_lora_rank": 128}
MODEL |= {"qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64}
MODEL |= {"num_experts": 32, "num_experts_per_token": 4, "num_shared_experts": 2}
MODEL |= {"moe_intermediate_size": 96, "routed_expert_hidden_size": 128}  # multiples of 32, for MXFP4
LINEAR = {"num_heads": 3, "head_dim": 64, "short_conv_kernel_size": 4}  # in linear_attn_config

SHARD_BYTES = 15 << 20  # of the files that are written

# ---------------------------------------------------------------- data
# offset of a control slot -> its name, as in the released tokenizer
CONTROL = {0: "[BOS]", 1: "[EOS]", 2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>"}
CONTROL |= {6: "[start_header_id]", 7: "[end_header_id]", 9: "[EOT]", 18: "<|media_begin|>", 19: "<|media_content|>"}
CONTROL |= {20: "<|media_end|>", 21: "<|media_pad|>", 254: "[UNK]", 255: "[PAD]"}


def train_tokenizer(text, size):
    """Byte-level BPE of at most `size` tokens (256 bytes and merges), split as K3 splits; then 256 control slots."""
    bpe = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex("|".join(SPLIT_PATTERN)), behavior="isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.Sequence([split, to_bytes]), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(PARAGRAPH.split(text), trainer)
    n = bpe.get_vocab_size()
    names = [CONTROL.get(i, f"<|reserved_token_{n + i}|>") for i in range(CONTROL_SLOTS)]
    bpe.add_special_tokens([tokenizers.AddedToken(name, special=True, normalized=False) for name in names])
    return bpe


def batch(data, step, opt):
    """Random windows of data [n] -> x, y [B, T] int64, y the token after each x. They depend on the step and the seed
    alone, so a resumed run reads what an uninterrupted one would."""
    order = torch.Generator().manual_seed(opt.seed * 1_000_003 + step)
    start = torch.randint(len(data) - opt.seq, (opt.batch, 1), generator=order).to(data.device, non_blocking=True)
    window = data[start + torch.arange(opt.seq + 1, device=data.device)].long()
    return window[:, :-1], window[:, 1:]


def own_text(data, opt):
    """OWN_TEXT passages of data [n], 128 tokens each, with the 96 that INIT would write next -> ids int32. Drafts are
    made in such text, and it is more predictable than what people write."""
    at = torch.randint(len(data) - 128, (opt.own_text, 1), generator=torch.Generator().manual_seed(opt.seed))
    prompts = data.cpu()[at + torch.arange(128)].tolist()
    engine = Engine(opt.init, device=opt.device, max_batch=512, prefix_cache=False)
    outs = engine.generate(prompts, SamplingParams(max_tokens=96, ignore_eos=True), progress=True)
    ids = [i for prompt, out in zip(prompts, outs) for i in (*prompt, *out.token_ids)]
    return torch.tensor(ids, dtype=torch.int32, device=data.device)


# ---------------------------------------------------------------- model


def config(opt, vocab):
    """The K3Config that the settings describe, for a vocabulary of `vocab` ids."""
    for name in ("moe_intermediate_size", "routed_expert_hidden_size"):
        if getattr(opt, name) % moe.GROUP:
            raise ValueError(f"{name} is {getattr(opt, name)}; MXFP4 needs a multiple of {moe.GROUP}")
    layers = range(1, opt.num_hidden_layers + 1)
    full = [n for n in layers if n % 4 == 0 or n == len(layers)]
    linear = {name: getattr(opt, name) for name in LINEAR} | {"use_full_rank_gate": True, "gate_lower_bound": -5.0}
    linear |= {"full_attn_layers": full, "kda_layers": [n for n in layers if n not in full]}
    model = {name: getattr(opt, name) for name in MODEL} | {"num_nextn_predict_layers": int(opt.draft_steps > 0)}
    bos, end, pad = (vocab - CONTROL_SLOTS + i for i in (0, 2, 255))  # [BOS], <|end_of_msg|>, [PAD]
    ids = {"vocab_size": vocab, "bos_token_id": bos, "eos_token_id": end, "pad_token_id": pad}
    return K3Config(**model, **ids, linear_attn_config=linear)


def new_model(opt, vocab):
    """A K3 with random weights, or with those of INIT: unpacked experts, all float32."""
    if not opt.init:
        return K3(config(opt, vocab))
    saved = K3.from_pretrained(opt.init, torch.float32, progress=False)
    if opt.draft_steps and not saved.mtp:
        raise ValueError(f"{opt.init} has no MTP layer to train; give --draft-steps 0")
    weights = saved.state_dict()
    for name in [name.removesuffix("_packed") for name in weights if name.endswith("_packed")]:
        packed, scale = weights.pop(f"{name}_packed"), weights.pop(f"{name}_scale")
        weights[name] = moe.mxfp4_unpack(packed, scale, torch.float32)
    model = K3(saved.cfg)
    model.load_state_dict(weights)
    return model


# ---------------------------------------------------------------- loss, optimizer, balance


def losses(model, x, y, opt, frozen):
    """x, y [B, T] int64, y the token after each x -> next-token loss, MTP loss: 0-dim float32, nats per token; the
    second is 0 until the main model is frozen.

    Draft step j reads the x of step j-1 where the first reads h, so that the MTP layer learns to draft on from its own
    output. Row t of step j predicts y[t+j]. The MTP loss is the mean over the steps.
    """
    with torch.set_grad_enabled(not frozen):
        logits, hidden = model(x, return_hidden=True)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    mtp = torch.zeros_like(loss)
    if frozen:
        target = logits.softmax(-1) if opt.mtp_distill else y
        for j in range(1, opt.draft_steps + 1):
            draft, hidden = model.mtp_logits(x[:, j - 1 :], hidden, return_hidden=True)
            mtp = mtp + F.cross_entropy(draft.flatten(0, 1), target[:, j:].flatten(0, 1)) / opt.draft_steps
    return loss, mtp


def learning_rate(step, opt):
    """Warm-up, constant, linear to 0 (WSD, arXiv 2404.06395); then linear from MTP_LR to 0 for the MTP layer alone."""
    end = opt.main_steps
    if step >= end:
        return opt.mtp_lr * (opt.steps - step) / (opt.steps - end)
    return opt.lr * min(1, (step + 1) / max(1, opt.warmup), (end - step) / max(1, opt.decay * end))


def add_dropout(model, p):
    """Drops a share p of what each sub-layer of the main model adds to the residual stream, while that is trained."""

    def drop(part, args, y):
        return F.dropout(y, p, part.training and torch.is_grad_enabled())  # not while it is frozen

    for layer in model.layers:
        layer.self_attn.register_forward_hook(drop)
        layer.ffn.register_forward_hook(drop)


def count_load(router, args, output):
    """Forward hook of a Router: adds to its `load` [E] how many tokens chose each expert."""
    if router.training:
        ids = output[0].flatten()  # counted on the device: bincount would make the host wait in every layer
        router.load = router.load.scatter_add(0, ids, torch.ones_like(ids, dtype=torch.float32))


def balance(layers, rate):
    """Moves the router biases of MoE layers one step against the loads and zeroes these -> largest / mean load of the
    worst layer, 0-dim.

    Only the sign counts, and no loss term disturbs the model (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    """
    loads = torch.stack([layer.gate.load for layer in layers])
    mean = loads.mean(1, keepdim=True)
    for layer, move in zip(layers, rate * (mean - loads).sign()):
        layer.gate.load = torch.zeros_like(move)
        if layer.in_proj.weight.requires_grad:  # a frozen model keeps its choices
            layer.gate.e_score_correction_bias += move
    return (loads / mean).nan_to_num(1.0).max()  # the MTP layer's are 0 while it waits


# ---------------------------------------------------------------- the loop


def train(opt):
    """Trains until STEPS or MINUTES -> model, history, finished. OUT gets tokenizer.json, train.pt and history.json."""
    began, device, out = time.monotonic(), torch.device(opt.device), Path(opt.out)
    text, held_out = read(opt.data), read(opt.val)
    out.mkdir(parents=True, exist_ok=True)
    if not opt.resume:
        if opt.init:
            shutil.copyfile(Path(opt.init) / "tokenizer.json", out / "tokenizer.json")
        else:
            train_tokenizer(text, opt.bpe_size).save(str(out / "tokenizer.json"))
    tokenizer = Tokenizer.from_pretrained(out)
    data, val = encode(tokenizer, text, device), encode(tokenizer, held_out, device)
    if len(data) <= opt.seq:
        raise ValueError(f"the data has {len(data)} tokens, a sequence takes {opt.seq + 1}; give more, or lower --seq")
    own = own_text(data, opt) if opt.own_text else data
    if len(own) <= opt.seq:
        raise ValueError(f"--own-text {opt.own_text} gives {len(own)} tokens, a sequence takes {opt.seq + 1}; raise it")
    part = val[: 64 * opt.seq]
    part_bytes = len(held_out.encode()) * len(part) / len(val)

    torch.manual_seed(opt.seed)
    model = new_model(opt, tokenizer.vocab_size).to(device).train()
    optimizers, moes = make_optimizers(model, opt), [m for m in model.modules() if isinstance(m, moe.MoE)]
    add_dropout(model, opt.dropout)
    for layer in moes:
        layer.gate.load = torch.zeros_like(layer.gate.e_score_correction_bias)
        layer.gate.register_forward_hook(count_load)
    first, history, sums = 0, [], torch.zeros(3, device=device)  # sums since the last row: loss, MTP loss, balance
    if opt.resume:
        saved = torch.load(out / "train.pt", map_location=device, weights_only=True)
        first, history, sums = saved["step"], saved["history"], saved["sums"]
        quantize(model, on=first - 1 >= opt.quant_from * opt.steps)  # before loading: it renames parameters
        model.load_state_dict(saved["model"])
        for optimizer, state in zip(optimizers, saved["optimizers"]):
            optimizer.load_state_dict(state)
    half = opt.dtype == "bfloat16" or (opt.dtype == "auto" and device.type == "cuda")
    cast = torch.autocast(device.type, torch.bfloat16, enabled=half)

    def update(x, y, frozen, fast):
        # cached: experts are rounded once a step, not at every use
        with cast, parametrize.cached(), kernels.use(**fast):
            loss, mtp = losses(model, x, y, opt, frozen)
        model.zero_grad()
        (mtp if frozen else loss).backward()
        nn.utils.clip_grad_norm_(model.parameters(), opt.clip)
        for optimizer in optimizers:
            optimizer.step()
        # Sums stay on the device: to read them in every step would make the host wait for it.
        sums.add_(torch.stack([loss.detach(), mtp.detach(), balance(moes, opt.bias_rate)]))

    bar = tqdm(range(first, opt.steps), initial=first, total=opt.steps, unit=" steps")
    clock, logged, bits, phase = time.monotonic(), first, math.nan, None
    for step in bar:
        frozen, quantized = step >= opt.main_steps, step >= opt.quant_from * opt.steps
        if phase != (frozen, quantized):
            phase, fast = (frozen, quantized), fast_ops(device, frozen)
            run = Graphed(functools.partial(update, frozen=frozen, fast=fast), device)
            quantize(model, on=quantized)
            for name, p in model.named_parameters():
                p.requires_grad &= name.startswith("mtp.") or not frozen
        for optimizer, peak in zip(optimizers, (opt.lr, opt.adam_lr)):
            optimizer.param_groups[0]["lr"].fill_(learning_rate(step, opt) * peak / opt.lr)
        torch.manual_seed(opt.seed * 1_000_003 + step)  # dropout too depends on the step alone
        run(*batch(own if frozen and step % 2 else data, step, opt))

        done, last = step + 1, step + 1 == opt.steps
        measure = last or done % opt.eval_every == 0
        if measure or done % opt.log_every == 0:
            loss, mtp, worst = (sums / (done - (history[-1]["step"] if history else 0))).tolist()
            sums.zero_()
            if not math.isfinite(loss + mtp):
                raise ValueError(f"the loss is {loss} at step {done}; start again with a lower --lr than {opt.lr:g}")
            tokens, now = opt.batch * opt.seq, time.monotonic()
            speed, clock, logged = (done - logged) * tokens / (now - clock), now, done
            row = {"step": done, "tokens": done * tokens, "epochs": done * tokens / len(data), "loss": loss}
            row |= {"mtp_loss": mtp, "balance": worst, "lr": learning_rate(step, opt), "tokens_per_second": speed}
            if measure:
                with cast, parametrize.cached():
                    row["val"] = bits = bits_per_byte(model.eval(), part, part_bytes, opt.seq)
                model.train()
            history.append(row)
            shown = f"loss {loss:.3f} mtp {mtp:.3f} val {bits:.3f} bits/byte balance {worst:.2f} lr {row['lr']:.1e}"
            bar.set_postfix_str(f"{shown} {speed:,.0f} tokens/s")
        late = opt.minutes and time.monotonic() - began > 60 * opt.minutes
        if last or late or done % opt.save_every == 0:
            state = {"step": done, "history": history, "sums": sums, "settings": vars(opt)}
            state |= {"model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
            torch.save(state, out / "train.pt.part")
            os.replace(out / "train.pt.part", out / "train.pt")  # whole or not at all
            (out / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
        if late and not last:
            print(f"stopped at step {done} of {opt.steps}; to go on: python train.py --resume --out {out}")
            return model, history, False
    return model, history, True


# ---------------------------------------------------------------- the end


def export(model, out):
    """Writes the model to the folder `out`: experts as MXFP4, the rest bfloat16 where from_pretrained has it narrow."""
    quantize(model, on=False)
    with tempfile.TemporaryDirectory(dir=out) as tmp:
        model.save_pretrained(tmp, mxfp4=True, mtp_copies=False)
        K3.from_pretrained(tmp, torch.bfloat16, progress=False).save_pretrained(out, None, False, SHARD_BYTES)


def plot(history, path):
    """Draws the losses, where matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # an optional extra
    except ImportError:
        return print(f'no {path.name}: it needs matplotlib; pip install -e ".[plots]"')
    figure = Figure(figsize=(8, 5))
    axes = figure.subplots()
    for key, unit in (("loss", "nats per token"), ("mtp_loss", "nats per token"), ("val", "held-out bits per byte")):
        axes.plot(*zip(*((row["step"], row[key]) for row in history if row.get(key))), label=f"{key}, {unit}")
    axes.set(xlabel="step", yscale="log")
    axes.legend()
    figure.savefig(path)


def model_card(model, opt, history, found):
    """The README.md of the checkpoint in OUT. found: of evaluate."""
    cfg, last, mtp = model.cfg, history[-1], f"model.layers.{model.cfg.num_hidden_layers}."
    size = {name: w.numel() for name, w in model.published().items()}
    used = {name: n for name, n in size.items() if not name.startswith((mtp, "model.embed_tokens"))}
    idle = sum(n for name, n in used.items() if ".experts." in name) * (1 - cfg.num_experts_per_token / cfg.num_experts)
    files = sum(file.stat().st_size for file in Path(opt.out).glob("*.safetensors"))
    rows = {"parameters": f"{sum(size.values()):,}, the MTP layer's included"}
    rows |= {"used per token": f"{sum(used.values()) - round(idle):,}, without the embedding and the MTP layer"}
    rows |= {"weights on disk": f"{files:,} bytes: routed experts MXFP4, the rest bfloat16"}
    rows |= {"trained on": f"{last['tokens']:,} tokens, {last['epochs']:.1f} epochs"}
    rows |= {"training loss at the end": f"{last['loss']:.4f} nats per token"} | found
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    sources = f"{sum(os.path.getsize(f) for f in opt.data):,} bytes of text."
    if opt.sources:
        sources = re.sub("^# ", "### ", read([opt.sources]).strip())
    about = "A language model with the architecture of Kimi K3, trained from scratch by train.py; no weights of the "
    about += f"released model are in it. License: Apache-2.0.\n\n{table}\n\n## Data\n\n{opt.card_data}\n\n"
    about += f"{sources}\n\n## Made by\n\n```\n{opt.command}\n```\n"
    return f"---\nlicense: apache-2.0\n---\n\n# A small Kimi K3\n\n{about}"


def settings(argv):
    """Command line -> Namespace of all settings: a flag first, then (with --resume) train.pt, then the constants."""
    parser = argparse.ArgumentParser("train.py", None, __doc__, argument_default=argparse.SUPPRESS)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    constants = Path(__file__).read_text(encoding="utf-8").partition("# The model,")[0]
    help_ = dict(re.findall(r"^([A-Z_]+) = .*?  # (.*)$", constants, re.M))
    defaults = {name.lower(): globals()[name] for name in help_} | MODEL | LINEAR
    kinds = {bool: {"action": argparse.BooleanOptionalAction}, list: {"nargs": "+", "action": "extend"}}
    for name, value in defaults.items():
        kind = kinds.get(type(value), {"type": type(value), "metavar": type(value).__name__.upper()})
        text = f"{help_.get(name.upper(), 'as in config.json')} [{value}]".replace("%", "%%")
        parser.add_argument(f"--{name.replace('_', '-')}", help=text, **kind)
    given, saved = vars(parser.parse_args(argv)), {}
    if (given.get("resume") or given.get("init")) and given.keys() & (MODEL.keys() | LINEAR.keys() | {"bpe_size"}):
        raise ValueError("--resume, --init: the sizes of the model are those it has; leave their flags out")
    if given.get("own_text") and not given.get("init"):
        raise ValueError("--own-text: it is the checkpoint of --init that writes; give one")
    if given.get("resume"):
        file = Path(given.get("out", OUT)) / "train.pt"
        if not file.is_file():
            raise FileNotFoundError(f"{file}: nothing to resume; a run writes it every --save-every steps")
        saved = torch.load(file, map_location="cpu", weights_only=True)["settings"] | {"minutes": MINUTES}
    shown = [Path(a).name if os.path.isabs(a) or os.path.exists(a) else a for a in argv]  # no folders of this machine
    opt = argparse.Namespace(**defaults | {"command": shlex.join(["python", "train.py", *shown])} | saved | given)
    opt.main_steps = opt.steps - round(opt.mtp_only * opt.steps) * bool(opt.draft_steps)  # then the MTP layer's begin
    return opt


def main(argv=None):
    try:
        opt = settings(sys.argv[1:] if argv is None else argv)
        if not (opt.val and opt.data):
            raise ValueError("give --data FILE, to train on, and --val FILE, held out")
        if opt.device.startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("PyTorch sees no GPU here; use --device cpu")
        model, history, finished = train(opt)
        if finished:
            export(model, Path(opt.out))
            plot(history, Path(opt.out) / "loss.png")
            card = model_card(
                model, opt, history, evaluate(opt.out, opt.val, opt.seq, opt.eval_prompts, opt.draft_steps, opt.device)
            )
            (Path(opt.out) / "README.md").write_text(card, encoding="utf-8")
    except (ValueError, OSError) as e:
        print(f"train.py: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
