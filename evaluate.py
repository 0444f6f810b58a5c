"""Measures a checkpoint on held-out text: bits per byte, and tokens per cycle of draft and verify.

python evaluate.py tiny --val held_out.txt
python evaluate.py tiny --val held_out.txt --kv-dtype fp8     through the page pool, with latent rows of 8 bits
"""

import argparse
import itertools
import math
import re
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from cache import FP8, Batch, Chunk, PagePool
from model import K3
from tokenizer import Tokenizer

PARAGRAPH = re.compile(r"(?<=\n\n)(?=\S)")  # where text is cut before encoding: no token crosses, and it is faster


def read(files):
    """Text files -> their texts, with a blank line between."""
    try:
        return "\n\n".join(Path(file).read_text(encoding="utf-8") for file in files)
    except UnicodeDecodeError as e:
        raise ValueError(f"{', '.join(files)}: not UTF-8 text ({e})") from None


def encode(tokenizer, text, device):
    """text -> ids [n] int32."""
    ids = [i for paragraph in PARAGRAPH.split(text) for i in tokenizer.encode(paragraph)]
    return torch.tensor(ids, dtype=torch.int32, device=device)


@torch.no_grad()
def bits_per_byte(model, ids, size, seq):
    """ids [n] of a text of `size` bytes -> bits per byte. Windows of seq tokens, the half window before as context.

    The first token, which nothing predicts, costs log2 V.
    """
    score = torch.arange(0, len(ids), seq, device=ids.device)[:, None]  # where each window begins
    target = (score - seq // 2).clamp(min=0) + torch.arange(1, seq // 2 + seq + 1, device=ids.device)
    counts = (target >= score) & (target < score + seq) & (target < len(ids))
    padded = F.pad(ids.long(), (0, 2 * seq))
    nats = torch.full((), math.log(model.cfg.vocab_size), dtype=torch.float64, device=ids.device)
    for t, c in zip(target.split(8), counts.split(8)):
        loss = F.cross_entropy(model(padded[t - 1]).flatten(0, 1), padded[t].flatten(), reduction="none")
        nats += loss.double()[c.flatten()].sum()
    return nats.item() / math.log(2) / size


@torch.no_grad()
def bits_per_byte_paged(model, ids, size, seq, latent_dtype=None):
    """The same windows, each read in four chunks through a page pool; latent_dtype: of its rows, None: the model's."""
    rows, step = seq // 2 + seq, -(-(seq // 2 + seq) // 4)
    pool = PagePool(model.cfg, PagePool(model.cfg, 0, model.norm.weight.dtype, "meta", latent_dtype).pages_for(rows),
                    model.norm.weight.dtype, ids.device, latent_dtype)  # fmt: skip
    state, pages = np.split(np.arange(pool.num_pages), [pool.groups])
    nats = math.log(model.cfg.vocab_size)
    for begin in tqdm(range(0, len(ids) - 1, seq), unit=" windows", delay=2):
        first = max(begin - seq // 2, 0)
        window = ids[first : min(begin + seq, len(ids))].long()
        for at in range(0, len(window) - 1, step):
            n = min(step, len(window) - 1 - at)
            hidden = model.hidden(window[at : at + n], Batch.paged(pool, [Chunk(n, at, pages, state, state)]))
            loss = F.cross_entropy(model.logits(hidden), window[at + 1 : at + 1 + n], reduction="none")
            nats += loss.double()[max(begin - first - at - 1, 0) :].sum().item()
    return nats / math.log(2) / size


@torch.no_grad()
def drafts_kept(model, prompts, new, drafts):
    """Plain speculative decoding at temperature 0: whole sequences every time, no cache.

    A cycle: the MTP layer drafts, the main model reads the drafts, keeps them while it agrees, then adds its own token.
    prompts [B, C] int64, continued by `new` >= 2 tokens -> kept [cycles] int64, how many drafts each cycle kept.
    """
    ids = F.pad(prompts, (0, new + drafts))
    n = torch.full_like(ids[:, 0], prompts.shape[1])  # known tokens of each sequence; drafts stand after them
    kept = []
    for cycle in itertools.count():
        logits, hidden = model(ids[:, : int(n.max()) + drafts], return_hidden=True)
        at = n[:, None] + torch.arange(drafts + 1, device=ids.device)
        greedy = logits.argmax(-1).gather(1, at - 1)  # [B, drafts + 1]: what the main model says at n, n + 1, ...
        agree = (greedy[:, :-1] == ids.gather(1, at[:, :-1])).cumprod(1).sum(1)
        if cycle == 0:
            agree.zero_()  # no drafts yet: the prompt alone gives a token, and that is no cycle
        else:
            kept.append(agree)
        ids.scatter_(1, at, greedy)
        n = n + agree + 1
        live = n < prompts.shape[1] + new
        if not live.any():
            break
        ids, n, hidden = ids[live], n[live], F.pad(hidden[live], (0, 0, 0, drafts))
        T, row = int(n.max()) + drafts, torch.arange(len(n), device=ids.device)
        for t in range(-2, drafts - 2):  # row n + t: the h there (of a drafted token: x) and the token after it
            x = model.mtp_hidden(ids[:, 1:T].flatten(), hidden[:, : T - 1].flatten(0, 1), Batch.whole(len(n), T - 1))
            x = x.unflatten(0, (len(n), T - 1))[row, n + t]
            ids[row, n + t + 2] = model.mtp_head(x).argmax(-1)
            hidden[row, n + t + 1] = x
    return torch.cat(kept)


def evaluate(folder, val, seq=512, prompts=64, drafts=3, device="cpu", kv_dtype=None):
    """Measures a saved checkpoint in float32 on the files `val` -> {what: text}; prints it."""
    model = K3.from_pretrained(folder, dtype=torch.float32, device=device, progress=False)
    text = read(val)
    ids, size = encode(Tokenizer.from_pretrained(folder), text, device), len(text.encode())
    if len(ids) < 128:
        raise ValueError(f"{', '.join(val)}: {len(ids)} tokens; a prompt alone takes 128, give more text")
    if kv_dtype:
        bits = {name: bits_per_byte_paged(model, ids, size, seq, latent) for name, latent in (("", None), ("fp8", FP8))}
        found = {
            "held-out bits per byte": f"{bits['']:.5f} with rows as the model has them, {bits['fp8']:.5f} with FP8 rows"
        }
        print("\n".join(f"{name}: {value}" for name, value in found.items()))
        return found
    found = {"held-out bits per byte": f"{bits_per_byte(model, ids, size, seq):.4f} (of {size:,} bytes)"}
    if model.mtp and drafts:
        start = torch.linspace(0, len(ids) - 128, prompts, device=ids.device).long()
        texts = ids[start[:, None] + torch.arange(128, device=ids.device)].long()
        kept = torch.cat([drafts_kept(model, some, 64, drafts) for some in texts.split(32)]).double()
        shares = [f"{(kept > j).double().mean():.1%}" for j in range(drafts)]
        found["tokens per cycle"] = f"{1 + kept.mean():.3f} (cycles that kept draft 1, 2, ...: {', '.join(shares)})"
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
    return found


def main(argv=None):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("folder", help="the checkpoint")
    p.add_argument("--val", nargs="+", required=True, metavar="FILE", help="held-out text")
    p.add_argument(
        "--seq",
        type=int,
        default=512,
        help="tokens scored per window; half as many before it are context [%(default)s]",
    )
    p.add_argument("--prompts", type=int, default=64, help="prompts for tokens per cycle [%(default)s]")
    p.add_argument("--drafts", type=int, default=3, help="drafts per cycle [%(default)s]")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="[%(default)s]")
    p.add_argument("--kv-dtype", choices=["fp8"], help="compare rows as the model has them with rows of this type")
    args = vars(p.parse_args(argv))
    try:
        if min(args["seq"], args["prompts"]) < 1 or args["drafts"] < 0:
            raise ValueError("--seq and --prompts must be at least 1, --drafts at least 0")
        if args["device"].startswith("cuda") and not torch.cuda.is_available():
            raise ValueError("PyTorch sees no GPU here; use --device cpu")
        evaluate(**args)
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
