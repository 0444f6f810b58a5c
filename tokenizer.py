"""Text <-> token ids, for a checkpoint folder with `tokenizer.json` or with K3's `tiktoken.model`.

Both are byte-level BPE: every ordinary token is a string of bytes, so any text can be encoded and any ids decoded.
Control tokens ([BOS], <|open|>, ...) are kept apart from that. Text that merely spells one stays ordinary text, unless
the caller asks for that control token by name: what a user types can never open or close a message.
"""

import base64
import codecs
import json
import operator
import re
from pathlib import Path

import tokenizers

# K3's pre-tokenizer: BPE merges only inside a match. `&&[^\p{Han}]` is class intersection: Han has its own alternative.
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = [
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?" + UPPER + "*" + LOWER + "+" + CONTRACTION,
    r"[^\r\n\p{L}\p{N}]?" + UPPER + "+" + LOWER + "*" + CONTRACTION,
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
]

CONTROL_SLOTS = 256  # the ids that follow the ranks of tiktoken.model, named or not
MAX_SPACE_RUN = 900_000  # see cut_space_runs

# GPT-2's table, character -> byte: printable Latin-1 stands for itself, the other bytes for U+0100, U+0101, ...
PRINTABLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
OTHERS = [b for b in range(256) if b not in PRINTABLE]
BYTE_OF = {chr(b): b for b in PRINTABLE} | {chr(0x100 + i): b for i, b in enumerate(OTHERS)}


class Tokenizer:
    """Text <-> ids for a K3-family checkpoint folder.

    vocab_size: int, how many ids decode (0..vocab_size-1), control slots included
    control: dict[str, int], control token name -> id
    """

    def __init__(self, tokens, control, encode_ordinary):
        """tokens: {id: bytes}, the ordinary tokens; encode_ordinary: str -> list[int], which knows no control token."""
        self.control = control
        self.vocab_size = 1 + max([*tokens, *control.values()])
        self._tokens = tokens
        self._names = {id: name for name, id in control.items()}
        self._encode_ordinary = encode_ordinary

    @classmethod
    def from_pretrained(cls, path) -> "Tokenizer":
        """Load the folder `path` (str or Path): its tiktoken.model, or else its tokenizer.json.

        FileNotFoundError: no such folder, or neither file in it. ValueError: a file that is malformed or no byte-level
        BPE; two files that disagree on control ids; a tiktoken.model while the tiktoken package is not installed.
        """
        folder = Path(path)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder; give a folder with tokenizer.json or tiktoken.model")
        exact, converted = folder / "tiktoken.model", folder / "tokenizer.json"
        if exact.exists():
            tokens, control, encode = load_tiktoken(exact)
            if converted.exists():
                check_converted(converted, control)
            return cls(tokens, control, encode)
        if converted.exists():
            return cls(*load_json(converted))
        raise FileNotFoundError(f"{folder}: no tokenizer.json and no tiktoken.model; copy one from the checkpoint")

    def encode(self, text, control=()) -> list[int]:
        """text: str; control: names of the control tokens to recognise where the text spells them, by default none.

        A surrogate ("\\ud800"), which is no character, is encoded as U+FFFD. ValueError: a name of no control token.
        """
        names = [control] if isinstance(control, str) else list(control)
        for name in names:
            if name not in self.control:
                known = ", ".join(list(self.control)[:8])
                raise ValueError(f"unknown control token {name!r}; known ones are the keys of .control: {known} ...")
        names.sort(key=len, reverse=True)  # the longest first: one name may begin another
        text = re.sub("[\ud800-\udfff]", "\ufffd", text)
        pieces = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        ids = []
        for i, piece in enumerate(pieces):  # re.split alternates: ordinary text, control name, ordinary text, ...
            ids += [self.control[piece]] if i % 2 else self._encode_ordinary(piece)
        return ids

    def decode(self, ids) -> str:
        """ids: iterable of int. A control id gives its name; bytes that are not UTF-8 give U+FFFD.

        ValueError: an id outside 0..vocab_size-1.
        """
        stream = self.stream()
        return "".join([stream.push(id) for id in ids]) + stream.flush()

    def stream(self, before=()) -> "StreamDecoder":
        """A decoder to push ids into one by one as they are sampled. before: the ids of the prompt, see there."""
        return StreamDecoder(self, before)

    def token_bytes(self, id) -> bytes:
        """What one id stands for (a control id: its name in UTF-8). ValueError: an id outside 0..vocab_size-1."""
        id = operator.index(id)  # takes integers of NumPy and PyTorch too
        if id in self._tokens:
            return self._tokens[id]
        if not 0 <= id < self.vocab_size:
            raise ValueError(f"token id {id} is out of range: this tokenizer decodes 0..{self.vocab_size - 1}")
        return self._names.get(id, reserved(id)).encode("utf-8", "replace")


class StreamDecoder:
    """Decode ids one by one. All that push returned, then flush(), equals Tokenizer.decode of the same ids.

    before: a sequence or array of ids that came before them. A character that these left unfinished may be completed
    by what is pushed, and is then returned whole; where it is not, nothing is returned for it.
    """

    def __init__(self, tokenizer, before=()):
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._before = b""
        for id in before[-3:]:  # a character has at most 4 bytes
            self.push(id) if id < tokenizer.vocab_size else self.flush()
        self._before = self._utf8.getstate()[0]  # the first bytes of a character

    def push(self, id) -> str:
        """The text that this id completes; bytes of an unfinished character wait. ValueError: an id out of range."""
        data, ordinary = self._tokenizer.token_bytes(id), operator.index(id) in self._tokenizer._tokens
        if self._before:
            self._forget(but=ordinary and _goes_on(self._before, data))
        if ordinary:
            return self._utf8.decode(data)
        return self.flush() + data.decode()  # a control token ends what came before it, finished or not

    def flush(self) -> str:
        """What still waits: "", or U+FFFD for a character that was never finished."""
        if self._before:
            self._forget(but=False)
        return self._utf8.decode(b"", final=True)

    def _forget(self, but):
        """The prompt's unfinished character is dropped, but where the answer goes on with it."""
        if not but:
            self._utf8.reset()
        self._before = b""


def _goes_on(start, data):
    """Whether data (bytes) goes on with the character that start begins."""
    try:
        (start + data[:1]).decode()
    except UnicodeDecodeError as e:
        return e.reason == "unexpected end of data"
    return True


def load_json(file):
    """file: Path of a tokenizer.json -> the arguments of Tokenizer(). ValueError: not a byte-level BPE.

    Its added tokens that are special become control tokens, but for single bytes, which are text whatever they are
    called. The others are text: the package matches them, as lstrip, rstrip, single_word and normalized say.
    """
    try:
        data = read_json(file)
        if not any('"type": "ByteLevel"' in json.dumps(data.get(key)) for key in ("pre_tokenizer", "normalizer")):
            raise ValueError(f"{file}: no ByteLevel pre_tokenizer or normalizer; only byte-level BPE is supported")
        model = data["model"]
        if "merges" not in model:
            raise ValueError(f"{file}: its model is {model.get('type')}, not BPE; only byte-level BPE is supported")
        vocab, added = model["vocab"], data.get("added_tokens") or []
        named = control_map(file, [(entry["id"], entry["content"]) for entry in added])
        special = {entry["content"] for entry in added if entry.get("special", True)}
        matched = {name: id for name, id in named.items() if name not in special}
        control = {n: id for n, id in named.items() if n in special and not (n in BYTE_OF and vocab.get(n) == id)}
        merges = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        made = {"".join(parts): parts for parts in reversed(merges)}  # token -> what it is merged from, first of all

        # No text, normalizer or template can make a control id: the package does not match them; one that is not merged
        # leaves the vocabulary, one that is may be merged further, and is taken apart where it remains.
        ids = set(control.values())
        ordinary = {t: id for t, id in vocab.items() if id not in ids or (control.get(t) == id and t in made)}
        tokens = {id: from_byte_level(token) for token, id in ordinary.items()}
        if len(tokens) < len(ordinary):
            raise ValueError(f"{file}: two tokens of the vocabulary have the same id")
        for name, id in matched.items():
            if ordinary.get(name, id) != id or (name not in ordinary and id in tokens):
                raise ValueError(f"{file}: added token {name!r} has id {id}, but the vocabulary has another there")
        check_bytes(file, tokens.values())
        for merge, parts in zip(model["merges"], merges):  # the package panics where a merge has no token
            for token in {*parts, "".join(parts)} - ordinary.keys():
                raise ValueError(f"{file}: merge {merge!r} needs {token!r}, which is not an ordinary token")
        # The package numbers added tokens itself, after the vocabulary: so that has no gaps while it works.
        model.update(vocab={token: n for n, token in enumerate(ordinary)}, dropout=None)
        data.update(post_processor=None, truncation=None, padding=None)  # these would change ids behind our back
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{file}: not laid out as a tokenizer.json ({type(e).__name__}: {e})") from None
    try:
        bpe = tokenizers.Tokenizer.from_str(json.dumps(data))
    except Exception as e:  # noqa: BLE001 (the package raises no narrower one)
        raise ValueError(f"{file}: cannot be built by the tokenizers package: {e}") from None

    bpe.encode_special_tokens = True  # the package's way of not matching them

    def apart(token):
        return [id for part in made[token] for id in apart(part)] if ordinary[token] in ids else [ordinary[token]]

    ids_of = {n: apart(token) for n, token in enumerate(ordinary)}  # the package's number -> ids
    for name, id in matched.items():
        n = bpe.token_to_id(name)
        ids_of[n], tokens[id] = [id], from_byte_level(bpe.id_to_token(n))  # newer packages normalize the name

    def encode(text):
        return [id for n in bpe.encode(text, add_special_tokens=False).ids for id in ids_of[n]]

    return tokens, control, encode


def load_tiktoken(file):
    """file: Path of a tiktoken.model, beside it maybe a tokenizer_config.json -> the arguments of Tokenizer()."""
    try:
        import tiktoken  # an optional extra: only K3's own tokenizer needs it
    except ImportError:
        raise ValueError(f'{file}: needs the tiktoken package: pip install -e ".[tiktoken]"') from None
    ranks = {}
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        if not line:
            continue
        try:
            token, rank = line.split()
            token, rank = base64.b64decode(token, validate=True), int(rank)
        except ValueError:
            raise ValueError(f"{file}:{number}: expected `base64 rank`, found {line[:60]!r}; fetch it again") from None
        if token in ranks:
            raise ValueError(f"{file}:{number}: token {token!r} already has rank {ranks[token]}; fetch the file again")
        ranks[token] = rank
    n = len(ranks)
    if set(ranks.values()) != set(range(n)):
        raise ValueError(f"{file}: its {n} ranks are not 0..{n - 1}, each once; the file is damaged, fetch it again")
    check_bytes(file, ranks)

    names = {id: reserved(id) for id in range(n, n + CONTROL_SLOTS)}
    config = file.with_name("tokenizer_config.json")
    if config.exists():
        data = read_json(config)
        try:
            added = data.get("added_tokens_decoder") or {}
            named = {int(id): entry["content"] for id, entry in added.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ValueError(f"{config}: added_tokens_decoder is not {{id: {{content: name}}}} ({e!r})") from None
        for id in named.keys() - names.keys():
            raise ValueError(f"{config}: names id {id}, not one of the control slots {n}..{n + CONTROL_SLOTS - 1}")
        names.update(named)
    control = control_map(config, names.items())

    bpe = tiktoken.Encoding("k3", pat_str="|".join(SPLIT_PATTERN), mergeable_ranks=ranks, special_tokens={})
    tokens = {rank: token for token, rank in ranks.items()}
    return tokens, control, lambda text: [id for run in cut_space_runs(text) for id in bpe.encode_ordinary(run)]


def check_converted(file, control):
    """ValueError where the control tokens of a tokenizer.json are others than those of the tiktoken.model beside it.

    control: {name: id} of the tiktoken.model. A name for a slot that has none there is no contradiction.
    """
    try:
        added = [(e["content"], e["id"], e.get("special", True)) for e in read_json(file).get("added_tokens") or []]
        names, wrong = {id: name for name, id in control.items()}, []
        for name, id, special in added:
            own = names.get(id, "an ordinary token" if special else name)
            if control.get(name, id) != id or own not in (name, reserved(id)):
                wrong.append(f"{id} is {name!r} here and {own!r} there")
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{file}: not laid out as a tokenizer.json ({type(e).__name__}: {e})") from None
    if wrong:
        raise ValueError(
            f"{file}: disagrees with tiktoken.model, which is exact, on {len(wrong)} control ids: {wrong[0]}; "
            "remove this file, or the other if it is not this checkpoint's"
        )


def cut_space_runs(text):
    """The pieces (str) of text to hand to tiktoken. Nearly always one: the whole text, so that nothing can differ.

    `\\s+(?!\\S)` takes one stack entry a character, and at 1,000,000 the regex engine panics. So a run of white space
    is cut every MAX_SPACE_RUN characters. Line ends match another alternative and need no stack.
    """
    runs = [run.span() for run in re.finditer(r"[^\S\r\n]+", text)] if len(text) > MAX_SPACE_RUN else []
    cuts = [cut for start, end in runs for cut in range(start + MAX_SPACE_RUN, end, MAX_SPACE_RUN)]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def from_byte_level(token):
    """bytes of a token (str) that is spelled with GPT-2's table; one written in other characters is its own UTF-8."""
    return bytes(BYTE_OF[char] for char in token) if BYTE_OF.keys() >= set(token) else token.encode("utf-8", "replace")


def reserved(id):
    return f"<|reserved_token_{id}|>"


def check_bytes(file, tokens):
    """ValueError unless every byte that UTF-8 can contain is a token: else some text would be lost in encoding."""
    missing = {bytes([b]) for b in range(0xF5) if b not in (0xC0, 0xC1)}.difference(tokens)
    if missing:
        raise ValueError(f"{file}: no token for byte 0x{min(missing).hex()}; a byte-level BPE has one for every byte")


def control_map(file, pairs):
    """pairs of (id, name) -> {name: id}. ValueError: an empty name, or a name or id given twice."""
    control = {}
    for id, name in pairs:
        if not isinstance(name, str) or not name or name in control or id in control.values() or id < 0:
            raise ValueError(f"{file}: control token {name!r} with id {id}: no name, or a name or id given twice")
        control[name] = id
    return control


def read_json(file):
    """file: Path -> the JSON value in it. ValueError: malformed, with the line."""
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as e:
        raise ValueError(f"{file}: malformed JSON ({e}); fetch the file again") from None


class TextStream:
    """Turns ids into text and watches for stop strings; what may be the start of one is held back. prompt: its ids."""

    def __init__(self, tokenizer, stop, prompt=()):
        self.decoder, self.vocab_size = tokenizer.stream(prompt), tokenizer.vocab_size
        self.stop, self.held = stop, ""

    def push(self, token):
        """-> (text that is safe to show, whether a stop string was completed)."""
        if token >= self.vocab_size:  # a row of padding in the output layer
            return self._release(self.held + self.decoder.flush() + "\ufffd")
        return self._release(self.held + self.decoder.push(token))

    def flush(self):
        """-> what is left at the end of the answer, up to a stop string that its last character completes."""
        text, stopped = self._release(self.held + self.decoder.flush())
        return text if stopped else text + self.held

    def _release(self, text):
        found = [at for at in (text.find(s) for s in self.stop) if at >= 0]
        if found:
            self.held = ""
            self.decoder.flush()  # the token that completed it may have begun a character behind it
            return text[: min(found)], True
        keep = max(
            (n for s in self.stop for n in range(1, min(len(s), len(text) + 1)) if text.endswith(s[:n])), default=0
        )
        self.held = text[len(text) - keep :]
        return text[: len(text) - keep], False
