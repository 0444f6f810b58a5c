"""Checkpoints on disk: safetensors in the published layout, read straight into the model's views and written from them.

`model.published()` maps every published tensor name to the view of a (fused or stacked) weight that holds it. Loading
fills each view exactly once from a tensor that is consumed exactly once; saving writes the same map back.
"""

import json
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn
from tqdm import tqdm

from mla import FP8_SCALES, MLA
from moe import GROUP, Experts, mxfp4_pack, mxfp4_unpack

INDEX = "model.safetensors.index.json"
OTHER_TOWERS = ("vision_tower.", "mm_projector.")
EXPERT = re.compile(r"\.experts\.\d+\.(w1|w2|w3)\.weight$")
NUMBERED = re.compile(r"model-(\d+)-of-(\d+)\.safetensors")
FLOATS = ("BF16", "F16", "F32", "F64")


def canonical(name):
    """The spelling that `model.published()` uses, for every spelling that checkpoints use."""
    name = name.removeprefix("language_model.")
    if name.endswith("_weight"):
        name = re.sub(r"\b(self_attention_res|mlp_res|output_attn_res)\.(norm|proj)_weight$", r"\1_\2.weight", name)
    return name.replace("block_sparse_moe.e_score_correction_bias", "block_sparse_moe.gate.e_score_correction_bias")


class Views(Mapping):
    """Published tensor name -> view. held: {name: view}, and of each MoE layer {"...experts.": Experts}: a view of one
    of its experts is made when it is asked for."""

    def __init__(self, held):
        self.held = held

    def __getitem__(self, name):
        if name in self.held:
            return self.held[name]
        at = name.rfind("experts.") + len("experts.")
        return self.held[name[:at]].view(name[at:])

    def __iter__(self):
        return iter(self.shapes())

    def __len__(self):
        return len(self.shapes())

    def shapes(self):
        """{name: shape}, without making the views."""
        shapes = {}
        for name, held in self.held.items():
            if isinstance(held, Experts):
                shapes |= {name + own: shape for own, shape in held.published().items()}
            else:
                shapes[name] = tuple(held.shape)
        return shapes


# ---------------------------------------------------------------- reading


def shard_files(path):
    """-> the names of the folder's shards, and the index {stored name: its shard}, None where there is none."""
    single, numbered = path / "model.safetensors", [NUMBERED.fullmatch(f.name) for f in path.glob("*.safetensors")]
    numbered = {match[0]: (int(match[1]), int(match[2])) for match in numbered if match}
    if (path / INDEX).is_file():
        try:
            weight_map = dict(json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"])
        except (ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{path / INDEX}: not a safetensors index ({e!r})") from None
        if not all(isinstance(f, str) for f in weight_map.values()):
            raise ValueError(f"{path / INDEX}: weight_map must give a file name for every tensor")
        files = sorted(set(weight_map.values()))
        absent = [f for f in files if not (path / f).is_file()]
        if absent:
            missing = _listing(f"of {len(files)} shards that {INDEX} names are missing", absent)
            raise FileNotFoundError(f"{path}: {missing}")
        return files, weight_map
    if single.is_file() and numbered:
        raise ValueError(f"{path}: holds {single.name} and {min(numbered)}, and no {INDEX} says which; remove one")
    if single.is_file():
        return [single.name], None
    if not numbered:
        raise FileNotFoundError(f"{path}: neither {INDEX} nor {single.name} is there")
    numbers, total = {n for n, _ in numbered.values()}, max(total for _, total in numbered.values())
    if any(t != total or not 0 < n <= t for n, t in numbered.values()):
        raise ValueError(f"{path}: without {INDEX}, {_listing('shards are not of one model', sorted(numbered))}")
    absent = [f"model-{n:05d}-of-{total:05d}.safetensors" for n in range(1, total + 1) if n not in numbers]
    if absent:
        raise FileNotFoundError(f"{path}: {_listing(f'of {total} shards are missing', absent)}")
    return sorted(numbered), None


def open_shards(path):
    """The folder's safetensors, memory-mapped -> {stored name: open file}, [stored name or file that the index leaves
    out]. The index decides: a tensor counts only in the shard that it names for it."""
    path = Path(path)
    files, weight_map = shard_files(path)
    stored, ignored, twice = {}, [], []
    for f in files:
        try:
            handle = safe_open(path / f, framework="pt")
        except (SafetensorError, OSError) as e:
            raise ValueError(f"{path / f}: damaged or incomplete safetensors file ({e}); fetch it again") from None
        for name in handle.keys():
            if weight_map is not None and weight_map.get(name) != f:
                ignored.append(f"{name} in {f}")
                continue
            twice += [f"{name} ({f})"] if name in stored else []
            stored[name] = handle
    lost = [f"{name} ({f})" for name, f in (weight_map or {}).items() if name not in stored]
    if twice or lost:
        faults = _listing("in two shards", twice, " ") + _listing(f"not in the shard that {INDEX} names", lost)
        raise ValueError(f"{path}: {faults}")
    if weight_map is not None:
        ignored += sorted({f.name for f in path.glob("*.safetensors")}.difference(files))
    return stored, ignored


def load(model, path, device="cpu", progress=True):
    """Fills `model` (built on the meta device) from the folder `path`, one tensor at a time, and returns it on
    `device`.

    Raises one ValueError that lists all missing, unexpected and misshaped tensors before anything is allocated.
    """
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device} was asked for, but PyTorch sees no GPU here; use cpu")
    plan = plan_load(model, path, progress)
    # What to_empty does; but its empty_like of a meta tensor imports sympy and half of PyTorch's compiler.
    model._apply(lambda t: torch.empty(t.shape, dtype=t.dtype, device=device))
    if model.cfg.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    views, copies = model.published(), copy_names(model)
    with (
        torch.no_grad(),
        tqdm(total=len(plan), unit=" tensors", desc="loading", disable=None if progress else True, delay=1) as bar,
    ):
        for name, got in plan:
            tensors = [handle.get_tensor(stored_name) for handle, stored_name, _, _ in got]
            if got and got[-1][1].endswith(".weight_scale") and (tensors[-1] == 255).any():
                raise ValueError(f"{path}: {got[-1][1]} has a scale byte 255 (NaN); the file is damaged")
            tensor = mxfp4_unpack(*tensors, torch.get_default_dtype()) if len(tensors) == 2 else [*tensors, None][0]
            if tensor is None:
                views[name].zero_()
            elif name in copies:
                attach_copy(model, path, name, copies[name], tensor)
            else:
                fill(name, views[name], tensor)
            bar.update()
    return model


def plan_load(model, path, progress):
    """-> [(canonical name, the sources that fill it)], a source being (file, stored name, shape, dtype): one; the two
    of an MXFP4 pair; none for an inert tensor that is not there. Fits the model to what is there: what stays packed,
    FP8 scales, the MTP layer. Nothing is read but headers, and no views are made: K3 has half a million tensors."""
    stored, ignored = open_shards(path)
    sources, towers, twice = {}, 0, []
    for name, handle in stored.items():
        if name.startswith(OTHER_TOWERS):
            towers += 1
            continue
        known, part = canonical(name), handle.get_slice(name)
        twice += [name] if known in sources else []
        sources[known] = (handle, name, tuple(part.get_shape()), part.get_dtype())
    said = [f"skipped {_listing(f'tensors or files that {INDEX} does not name', ignored)}"] if ignored else []
    said += [f"skipped {towers} tensors of the vision towers"] if towers else []
    said += settle_mtp(model, sources)
    for line in said if progress else ():
        tqdm.write(f"{path}: {line}", file=sys.stderr)

    hold_packed(model, sources)
    hold_scales(model, sources)
    wanted = model.published().shapes()
    inert = {f"model.layers.{model.cfg.num_hidden_layers}.{n}" for n in INERT} if model.mtp else ()
    wanted |= {n: tuple(w.shape) for n, w in copy_names(model).items() if n in sources or f"{n}_packed" in sources}
    plan, missing, misshaped, heads = [], [], [], model.cfg.kda_heads
    for name, shape in wanted.items():
        got = ()  # tuples: the garbage collector need not walk over half a million lists again and again
        if name in sources:
            got = (sources.pop(name),)
        elif f"{name}_packed" in sources and f"{name}_scale" in sources:
            got = (sources.pop(f"{name}_packed"), sources.pop(f"{name}_scale"))
        elif name not in inert:
            missing.append(name)
        misshaped += _faults(name, shape, got, heads)
        plan.append((name, got))
    faults = _listing("missing", missing, "; ") + _listing("unexpected", [s[1] for s in sources.values()], "; ")
    faults += _listing("misshaped", misshaped, "; ") + _listing("present in two spellings", twice, "; ")
    if faults:
        faults += _listing(f"skipped, as {INDEX} does not name them", ignored)
        raise ValueError(f"{path}: the tensors do not match config.json: {faults.rstrip('; ')}")
    return plan


INERT = [f"{mix}_{part}.weight" for mix in ("self_attention_res", "mlp_res") for part in ("norm", "proj")]


def settle_mtp(model, sources):
    """The tensors decide whether there is an MTP layer, where config.json says otherwise -> [what is to be said]."""
    cfg = model.cfg
    at = f"model.layers.{cfg.num_hidden_layers}."
    mine = [name for name in sources if name.startswith(at)]
    if not model.mtp and any(name.startswith(tuple(at + own for own in MTP_ONLY)) for name in mine):
        for name in mine:
            del sources[name]
        return [f"skipped {len(mine)} tensors of the MTP layer: num_nextn_predict_layers is 0"]
    if model.mtp and not mine:
        model.mtp, cfg.num_nextn_predict_layers = None, 0
        return ["loads without the MTP layer: num_nextn_predict_layers is 1, but there are no tensors of it"]
    return []


MTP_ONLY = ("enorm.", "hnorm.", "eh_proj.", "shared_head.")  # what marks one layer more as the MTP layer


def hold_packed(model, sources):
    """Gives every expert stack whose tensors all come as MXFP4 pairs its packed form: it stays packed in memory."""
    for prefix, experts in model.expert_stacks():
        for stack, parts in (("w13", ("w1", "w3")), ("w2", ("w2",))):
            w = getattr(experts, stack)
            names = [f"{prefix}{e}.{part}.weight" for e in range(w.shape[0]) for part in parts]
            pairs = all(n not in sources and f"{n}_packed" in sources and f"{n}_scale" in sources for n in names)
            E, out, width = w.shape
            if pairs and width % GROUP == 0:
                bytes_ = (torch.empty(E, out, width // n, dtype=torch.uint8, device="meta") for n in (2, GROUP))
                experts.set_packed(stack, *bytes_)


def hold_scales(model, sources):
    """Gives MLA layers the FP8 scales that the checkpoint ships for their cached rows."""
    for prefix, layer in model.decoder_layers():
        for name in FP8_SCALES if isinstance(layer.self_attn, MLA) else ():
            if f"{prefix}self_attn.{name}" in sources:
                setattr(layer.self_attn, name, nn.Parameter(torch.empty(1, device="meta"), requires_grad=False))


def copy_names(model):
    """Tensors that a checkpoint may ship although the model has them -> the main tensor they should equal."""
    copies = {"lm_head.weight": model.embed_tokens.weight} if model.cfg.tie_word_embeddings else {}
    if model.mtp:
        at = f"model.layers.{model.cfg.num_hidden_layers}."
        copies |= {
            at + "embed_tokens.weight": model.embed_tokens.weight,
            at + "shared_head.head.weight": model.lm_head.weight,
        }
    return copies


def attach_copy(model, path, name, main, tensor):
    """Shares memory where the copy equals the main tensor; otherwise the MTP layer gets its own."""
    own = tensor.to(main.device, main.dtype)
    if torch.equal(own, main):
        return
    if name == "lm_head.weight":
        raise ValueError(f"{path}: tie_word_embeddings is set, but lm_head.weight differs from the embedding")
    if name.endswith("embed_tokens.weight"):
        model.mtp.embed_tokens = nn.Embedding.from_pretrained(own, freeze=False)
    else:
        model.mtp.head = nn.Linear(*reversed(own.shape), bias=False, device="meta")
        model.mtp.head.weight = nn.Parameter(own)


def _faults(name, shape, sources, heads):
    """What is wrong with the one plain tensor, or the MXFP4 pair, that is to fill a weight of this shape."""
    plain = len(sources) == 1
    kinds = ("U8",) if not plain or name.endswith((".weight_packed", ".weight_scale")) else FLOATS
    if plain:
        if sources[0][2] == shape and sources[0][3] in kinds:
            return []
        shapes = [shape]
    else:
        divisible = len(shape) == 2 and shape[1] % GROUP == 0
        shapes = [(shape[0], shape[1] // 2), (shape[0], shape[1] // GROUP)] if divisible else ["no MXFP4 pair"] * 2
    return [
        f"{stored_name} ({dtype} {list(have)}, expected {want if isinstance(want, str) else list(want)})"
        for want, (_, stored_name, have, dtype) in zip(shapes, sources)
        if dtype not in kinds or have != want and not _fits(name, have, want, heads)
    ]


def _fits(name, have, want, heads):
    if name.endswith(".A_log"):  # [heads], [head_dim] padded, [1, 1, heads, 1]: fill() takes the first `heads` values
        return torch.Size(have).numel() == max(have, default=0) >= heads
    return [n for n in have if n != 1] == [n for n in want if n != 1]


def fill(name, view, tensor):
    """Copies a stored tensor into its view: same shape up to axes of length 1; A_log by its first values, and zeros."""
    if name.endswith(".A_log"):
        tensor = tensor.flatten()[: view.numel()]
        view.zero_()[: tensor.numel()].copy_(tensor)
    else:
        view.copy_(tensor.reshape(view.shape))


def _listing(what, names, end=""):
    """'3 missing: a, b, c' with at most 8 names; empty for none."""
    if not names:
        return ""
    more = f", and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{len(names)} {what}: {', '.join(names[:8])}{more}{end}"


# ---------------------------------------------------------------- writing


def save(model, path, mxfp4=None, mtp_copies=True, max_shard_bytes=5 << 30):
    """Writes `model` to the folder `path`; see K3.save_pretrained.

    The shards are written to a folder of their own first: the old files are replaced only when all are there.
    """
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path, prefix=".saving-") as part:
        shards = write_shards(Path(part), tensors_to_write(model, mxfp4, mtp_copies), max_shard_bytes)
        for old in [path / INDEX, *path.glob("model*.safetensors")]:
            old.unlink(missing_ok=True)
        weight_map, total = {}, 0
        for i, (file, names, nbytes) in enumerate(shards, 1):
            final = "model.safetensors" if len(shards) == 1 else f"model-{i:05d}-of-{len(shards):05d}.safetensors"
            os.replace(file, path / final)
            weight_map |= dict.fromkeys(names, final)
            total += nbytes
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (path / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    quantized = any(name.endswith("_packed") for name in weight_map)
    (path / "config.json").write_text(json.dumps(model.cfg.to_json(quantized), indent=1) + "\n", encoding="utf-8")


def write_shards(folder, tensors, max_bytes):
    """Writes (name, tensor) pairs to files of at most max_bytes -> [(file, names, bytes)]; holds one at a time."""
    shards, held, size = [], {}, 0

    def flush():
        file = folder / f"{len(shards)}.safetensors"
        save_file(held, file, metadata={"format": "pt"})
        file.chmod(0o644)
        shards.append((file, list(held), size))

    for name, tensor in tensors:
        if held and size + tensor.nbytes > max_bytes:
            flush()
            held, size = {}, 0
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        size += tensor.nbytes
    flush()
    return shards


def tensors_to_write(model, mxfp4=None, mtp_copies=True):
    """Yields (published name, tensor); works on the meta device where nothing has to be packed or unpacked."""
    prefix = "language_model." if model.cfg.wrapped else ""
    views = model.published()
    if model.mtp:
        at = f"model.layers.{model.cfg.num_hidden_layers}."
        for name, own, main in (
            ("embed_tokens", model.mtp.embed_tokens, model.embed_tokens),
            ("shared_head.head", model.mtp.head, model.lm_head),
        ):
            if own is not None or mtp_copies:
                views.held[f"{at}{name}.weight"] = (own or main).weight
    for name, view in views.items():
        if mxfp4 and EXPERT.search(name):
            yield from zip((f"{prefix}{name}_packed", f"{prefix}{name}_scale"), mxfp4_pack(view.detach()))
        elif mxfp4 is False and name.endswith(".weight_packed"):
            yield (
                prefix + name.removesuffix("_packed"),
                mxfp4_unpack(view, views[name.removesuffix("packed") + "scale"], model.norm.weight.dtype),
            )
        elif not (mxfp4 is False and name.endswith(".weight_scale")):
            yield prefix + name, view
