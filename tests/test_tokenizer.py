"""Both tokenizer backends, on small vocabularies that are made here."""

import base64
import codecs
import itertools
import json
import random
import sys

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

import tokenizer as module
from tokenizer import Tokenizer

BACKENDS = ["json", "tiktoken"]
ANY_TEXT = st.text(st.characters(exclude_categories=["Cs"]))
BYTES = [bytes([b]) for b in range(256)]
# Runs of one letter, words, and a Han character by way of its first two bytes: a token can be half a character.
HALF, HAN = "中".encode()[:2], "中".encode()
MERGES = [b"aa", b"aaaa", b"aaaaaaaa", b"  ", b"th", b"the", b" the", HALF, HAN, b"'s", b"12", b"\n\n"]
NAMES = ["[BOS]", "[EOS]", "[EOS]x", "<|open|>", "<|close|>", "[PAD]"]  # one begins another: the longest must win
LINES = ["the cat's hat, the cats", "[BOS] <|open|> PAD", "中文 和 日本語", "naïve café 🙂🙃", "12 345", "a  b\n\nc\td"]


# ---- making checkpoint folders ----


def write_tiktoken(folder, tokens, named=None):
    lines = [base64.b64encode(token) + b" " + str(rank).encode() for rank, token in enumerate(tokens)]
    (folder / "tiktoken.model").write_bytes(b"\n".join(lines) + b"\n")
    if named is not None:
        added = {str(id): {"content": name, "special": True} for id, name in named.items()}
        (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    return folder


def write_json(folder, data):
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


def train():
    """The package's own tokenizer, with NAMES as added tokens: three of them inside the vocabulary, three after it."""
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=NAMES[:3], initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    bpe.train_from_iterator(LINES * 3, trainer)
    bpe.add_special_tokens(NAMES[3:])
    return bpe


@pytest.fixture(scope="module")
def trained():
    return train()


@pytest.fixture
def data(trained):
    """The tokenizer.json of `trained` as a dict that a test may change."""
    return json.loads(trained.to_str())


@pytest.fixture(scope="module")
def tiktoken_tok(tmp_path_factory):
    pytest.importorskip("tiktoken")
    n = 256 + len(MERGES)
    named = {n: NAMES[0], n + 1: NAMES[1], n + 2: NAMES[2], n + 7: NAMES[3], n + 8: NAMES[4], n + 255: NAMES[5]}
    return Tokenizer.from_pretrained(write_tiktoken(tmp_path_factory.mktemp("tiktoken"), BYTES + MERGES, named))


@pytest.fixture(scope="module")
def json_tok(tmp_path_factory, trained):
    folder = tmp_path_factory.mktemp("json")
    trained.save(str(folder / "tokenizer.json"))
    return Tokenizer.from_pretrained(folder)


@pytest.fixture(scope="module", params=BACKENDS)
def tok(request):
    return request.getfixturevalue(request.param + "_tok")


def pieces(tok, text):
    return [tok.token_bytes(id).decode() for id in tok.encode(text)]


# ---- control tokens ----


def test_control_text_is_ordinary_text(tok):  # field note 15
    text = "a" + " ".join(tok.control) + "".join(tok.control)
    ids = tok.encode(text)
    assert not set(ids) & set(tok.control.values())
    assert tok.decode(ids) == text
    for name in tok.control:
        assert tok.control[name] not in tok.encode(name)


def test_control_by_name(tok):
    bos, eos, close = tok.control["[BOS]"], tok.control["[EOS]"], tok.control["<|close|>"]
    hi = tok.encode("hi")
    assert tok.encode("[BOS]hi[EOS]", control=["[BOS]", "[EOS]"]) == [bos, *hi, eos]
    assert tok.encode("[BOS]hi[EOS]", control=["[BOS]"]) == [bos, *tok.encode("hi[EOS]")]
    assert tok.encode("[BOS]", control=("[EOS]",)) == tok.encode("[BOS]")
    assert tok.encode("[BOS][BOS]", control={"[BOS]"}) == [bos, bos]
    assert tok.encode("hi<|close|>", control=iter(["<|close|>"])) == [*hi, close]
    assert tok.encode("hi<|close|>", control="<|close|>") == [*hi, close]
    for name, id in tok.control.items():
        assert tok.encode(f"hi{name}hi", control=tok.control) == [*hi, id, *hi]


def test_longest_control_name_wins(tok):
    for names in (["[EOS]", "[EOS]x"], ["[EOS]x", "[EOS]"]):
        ids = tok.encode("[EOS]x[EOS]", control=names)
        assert ids == [tok.control["[EOS]x"], tok.control["[EOS]"]]


@pytest.mark.parametrize("control", [["all"], "all", ["[BOS]", "[NO]"], [""], [0]])
def test_unknown_control_name(tok, control):
    with pytest.raises(ValueError, match="unknown control token"):
        tok.encode("text", control=control)


def test_all_256_slots_decode(tiktoken_tok):  # field note 16
    tok, n = tiktoken_tok, 256 + len(MERGES)
    expected = [f"<|reserved_token_{id}|>" for id in range(n, n + 256)]
    for slot, name in zip((0, 1, 2, 7, 8, 255), NAMES, strict=True):
        expected[slot] = name
    assert tok.vocab_size == n + 256
    assert tok.control == {name: n + slot for slot, name in enumerate(expected)}
    assert [tok.decode([n + slot]) for slot in range(256)] == expected
    assert [tok.token_bytes(n + slot) for slot in range(256)] == [name.encode() for name in expected]
    assert tok.decode(range(tok.vocab_size)).endswith("".join(expected))


def test_released_size(tmp_path):
    pytest.importorskip("tiktoken")
    shapes = itertools.chain.from_iterable(itertools.product(range(256), repeat=length) for length in (1, 2, 3))
    tokens = [bytes(shape) for shape in itertools.islice(shapes, 163_584)]
    named = {163_584: "[BOS]", 163_587: "<|open|>", 163_839: "[PAD]"}
    tok = Tokenizer.from_pretrained(write_tiktoken(tmp_path, tokens, named))
    assert tok.vocab_size == 163_840 and len(tok.control) == 256
    assert tok.decode([163_584, 163_592, 163_839]) == "[BOS]<|reserved_token_163592|>[PAD]"
    assert tok.token_bytes(163_583) == tokens[-1]


def test_json_control_map_and_holes(tmp_path, data):
    top = max(data["model"]["vocab"].values())
    data["added_tokens"].append({**data["added_tokens"][0], "id": top + 10, "content": "<think>"})
    tok = Tokenizer.from_pretrained(write_json(tmp_path, data))
    added = {entry["content"]: entry["id"] for entry in data["added_tokens"]}
    assert tok.control == added and set(NAMES) < set(added)
    assert tok.vocab_size == top + 11
    assert tok.decode([top + 10, top + 9]) == f"<think><|reserved_token_{top + 9}|>"
    assert tok.token_bytes(top + 9) == f"<|reserved_token_{top + 9}|>".encode()
    assert tok.control["<think>"] not in tok.encode("<think>") and tok.decode(tok.encode("<think>")) == "<think>"


def test_nothing_in_the_json_adds_control_ids(tmp_path, data, trained):
    plain = trained.encode("bob", add_special_tokens=False).ids
    bpe = tokenizers.Tokenizer.from_str(json.dumps(data))
    bpe.normalizer = normalizers.Replace("z", "[BOS]")
    bpe.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", 0)])
    bpe.enable_truncation(2)
    bpe.enable_padding(length=20, pad_id=trained.token_to_id("[PAD]"), pad_token="[PAD]")
    theirs = bpe.encode("bob").ids
    assert theirs[0] == 0 and len(theirs) == 20  # the package alone does add them
    data = json.loads(bpe.to_str())
    data["model"].update(unk_token="[BOS]", dropout=1.0)
    tok = Tokenizer.from_pretrained(write_json(tmp_path, data))
    assert tok.encode("bob") == plain and len(plain) > 2
    ids = tok.encode("z")
    assert not set(ids) & set(tok.control.values()) and tok.decode(ids) == "[BOS]"


def test_control_token_inside_the_vocabulary(tmp_path, data):
    data["model"]["ignore_merges"] = True  # then a whole word that is in the vocabulary is one token
    data["pre_tokenizer"]["use_regex"] = False
    without_added = tokenizers.Tokenizer.from_str(json.dumps({**data, "added_tokens": []}))
    assert without_added.encode("[BOS]").ids == [0]  # the danger is real: taking added_tokens out is not enough
    tok = Tokenizer.from_pretrained(write_json(tmp_path, data))
    assert 0 not in tok.encode("[BOS]") and tok.decode(tok.encode("[BOS]")) == "[BOS]"
    assert tok.encode("[BOS]", control=["[BOS]"]) == [0]


# ---- added tokens that are text ----

PLAIN = [  # content, and how the package matches it
    ("the", {}),
    ("!", {}),
    ("\n", {}),
    (" x", {}),
    ("é", dict(normalized=False)),
    ("<b>", dict(lstrip=True)),
    ("<c>", dict(rstrip=True, normalized=False)),
    ("hat", dict(single_word=True)),
    ("<bb>", dict(lstrip=True, rstrip=True)),
    ("CAT", dict(normalized=True)),
    ("Ġcat", dict(normalized=False)),
]


@pytest.fixture(scope="module", params=["plain", "lowercase", "prefix space", "ignore merges"])
def with_added(request, tmp_path_factory):
    """-> a tokenizer.json with PLAIN, some in its vocabulary and some after it, as the package and as we read it."""
    package = train()
    package.normalizer = normalizers.Lowercase() if request.param == "lowercase" else None
    package.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=request.param == "prefix space")
    data = json.loads(package.to_str())
    data["model"]["ignore_merges"] = request.param == "ignore merges"
    package = tokenizers.Tokenizer.from_str(json.dumps(data))
    assert {"the", "!", "Ġcat"} < data["model"]["vocab"].keys()
    package.add_tokens([tokenizers.AddedToken(content, **how) for content, how in PLAIN])
    package.encode_special_tokens = True  # the package's way not to match them
    folder = tmp_path_factory.mktemp("added")
    package.save(str(folder / "tokenizer.json"))
    return package, Tokenizer.from_pretrained(folder)


PARTS = [content for content, _ in PLAIN]
PARTS += ["breathe", "hats", " ", "  ", "\t", "cat", " cat", "Cat", "É", "xhat", "[EO"]
SOME_TEXT = st.lists(st.sampled_from(PARTS) | ANY_TEXT, max_size=10).map("".join)


@settings(max_examples=150, deadline=None)
@given(text=SOME_TEXT)
def test_added_tokens_that_are_text(with_added, text):  # field note 25
    package, tok = with_added
    ids = package.encode(text, add_special_tokens=False).ids
    assert tok.encode(text) == ids
    assert tok.decode(ids) == package.decode(ids, skip_special_tokens=False)
    assert set(tok.control) == set(NAMES) and not set(ids) & set(tok.control.values())


def test_added_tokens_in_the_middle_of_the_ids(tmp_path, data):
    """Their ids are the file's, whatever else is taken out of it."""
    top = max(data["model"]["vocab"].values())
    plain = {**data["added_tokens"][0], "special": False}
    for id, content in (top + 20, "<far>"), (top + 12, "<near>"), (data["model"]["vocab"]["the"], "the"):
        data["added_tokens"].append({**plain, "id": id, "content": content})
    tok = Tokenizer.from_pretrained(write_json(tmp_path, data))
    assert tok.encode("<near>the<far>") == [top + 12, data["model"]["vocab"]["the"], top + 20]
    assert tok.decode([top + 12, top + 11, top + 20]) == f"<near><|reserved_token_{top + 11}|><far>"


def test_a_special_token_that_text_is_merged_to(tmp_path, data):
    """It is never made from text, what is merged from it is; a byte is text whatever it is called."""
    vocab, merges = data["model"]["vocab"], [tuple(m) for m in data["model"]["merges"]]
    plain = Tokenizer.from_pretrained(write_json(tmp_path, data))
    the, bang, cat = vocab["the"], vocab["!"], vocab["Ġthe"]
    assert plain.encode("the") == [the] and plain.encode(" the") == [cat] and plain.encode("!") == [bang]
    special = {**data["added_tokens"][0], "special": True}
    data["added_tokens"] += [{**special, "id": the, "content": "the"}, {**special, "id": bang, "content": "!"}]
    tok = Tokenizer.from_pretrained(write_json(tmp_path, data))
    parts = [vocab[part] for part in next(pair for pair in merges if "".join(pair) == "the")]
    assert tok.encode("the the!") == [*parts, cat, bang] and tok.decode([the, cat, bang]) == "the the!"
    assert tok.encode("the", control="the") == [the] and "!" not in tok.control


# ---- ordinary text ----

FRAGMENTS = [*NAMES, "<|reserved_token_269|>", "[BO", "the", "中文", "🙂", "e\u0301", "\r\n", "  ", "12345", "'S", "\0"]
TEXTS = st.lists(ANY_TEXT | st.sampled_from(FRAGMENTS), max_size=8).map("".join)


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_round_trip(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text
    assert b"".join(map(tok.token_bytes, ids)) == text.encode()
    assert not set(ids) & set(tok.control.values())
    assert tok.decode(tok.encode(text, control=tok.control)) == text


@settings(max_examples=100, deadline=None)
@given(text=TEXTS)
def test_json_equals_the_package(json_tok, trained, text):
    assert json_tok.encode(text, control=json_tok.control) == trained.encode(text, add_special_tokens=False).ids
    if not any(name in text for name in NAMES):
        assert json_tok.encode(text) == trained.encode(text).ids


def test_tiktoken_merges_lowest_rank_first(tiktoken_tok):
    ranks = {token: rank for rank, token in enumerate(BYTES + MERGES)}

    def bpe(word):
        parts = [bytes([b]) for b in word]
        while True:
            pairs = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not pairs:
                return [ranks[part] for part in parts]
            i = min(pairs)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]

    for split in ("aaaaaaaaaaaaa", "the| the| breathe", "x|中中文", "a|    | a", "it's", "121|212"):
        words = split.split("|")
        assert tiktoken_tok.encode("".join(words)) == [id for word in words for id in bpe(word.encode())]


SPLITS = [  # the text, with a bar where it is split
    "I'm| sure|.| They'll| say| IT'S| fine",  # contractions stay with their word
    "don't| '|tis'Re",
    "123|456|7| |89٣",  # digits in threes, without the space
    "中文| and| |漢字|ひらがな",  # Han apart from other letters; kana is no Han
    "abc|中文|def|中|é",
    "camel|Case|HTTPServer| ABC",
    "f|(x|)| =| {}| ;\n\n|  | z",  # one space and the line ends go with punctuation
    "a|  \n\n|   | b| \n",
    "a|   | b",
    "a|\t\t|\tb|\u3000c| |1",
    "!\r\n|x|\r\n\r\n|y",
    "end|   ",
    "naïve| cafe\u0301| ǅabc",
    " 🙂🙂!|a",
]


@pytest.mark.parametrize("split", SPLITS)
def test_split_pattern(tmp_path, split):
    pytest.importorskip("tiktoken")
    expected = split.split("|")
    text = "".join(expected).encode()
    # Every run of bytes of the text is a token, so a piece of the split is exactly one token.
    runs = {text[i:j] for i in range(len(text)) for j in range(i + 2, len(text) + 1)}
    tok = Tokenizer.from_pretrained(write_tiktoken(tmp_path, BYTES + sorted(runs, key=lambda run: (len(run), run))))
    assert pieces(tok, text.decode()) == expected


def test_surrogates_become_replacement_characters(tiktoken_tok, json_tok):
    for tok in (tiktoken_tok, json_tok):
        assert tok.encode("a\ud800b\udfff") == tok.encode("a\ufffdb\ufffd")
        assert tok.decode(tok.encode("\ud83d\ude42[BOS]\udc00", control=["[BOS]"])) == "\ufffd\ufffd[BOS]\ufffd"


def test_empty(tok):
    assert tok.encode("") == [] and tok.decode([]) == "" and tok.stream().flush() == ""
    assert tok.encode("", control=tok.control) == []


# ---- long input ----


def test_long_text(tok):
    line = "the cat's 12 hats,  中文\n"  # a line end before a word is always a boundary, so lines encode one by one
    assert tok.encode(line * 20_000) == tok.encode(line) * 20_000


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000 + "x", "\n" * 100_000, "!" * 100_000, "中" * 20_000])
def test_long_runs(tok, text):
    ids = tok.encode(text)
    assert tok.decode(ids) == text and ids == tok.encode(text)


def test_long_runs_exactly(tiktoken_tok):
    a8, sp2, zhong = (256 + MERGES.index(token) for token in (b"a" * 8, b"  ", HAN))
    assert tiktoken_tok.encode("a" * 100_000) == [a8] * 12_500
    assert tiktoken_tok.encode(" " * 100_001 + "x") == [sp2] * 50_000 + [*b" x"]
    assert tiktoken_tok.encode("中" * 20_000) == [zhong] * 20_000


def test_space_run_that_tiktoken_alone_cannot_take(tiktoken_tok):
    text = "x" + "\t" * 1_100_000 + "y"
    assert tiktoken_tok.encode(text) == list(text.encode())


def test_only_long_space_runs_are_cut(monkeypatch):
    monkeypatch.setattr(module, "MAX_SPACE_RUN", 4)
    for text in ("abcdefghi jk", "a    b    c", "a\n\n\n\n\n\nb", "a   \n   b"):
        assert module.cut_space_runs(text) == [text]
    assert module.cut_space_runs("ab          cd\t\t\t\t\te") == ["ab    ", "    ", "  cd\t\t\t\t", "\te"]


# ---- decoding ----


def split_decode(tok, ids):
    """What ids decode to, by Python's whole-string decoder: bytes between control ids are decoded together."""
    names = {id: name for name, id in tok.control.items()}
    text = ""
    for is_control, group in itertools.groupby(ids, key=names.__contains__):
        if is_control:
            text += "".join(names[id] for id in group)
        else:
            text += b"".join(map(tok.token_bytes, group)).decode("utf-8", "replace")
    return text


def assert_streams(tok, ids):
    stream = tok.stream()
    pushed = [stream.push(id) for id in ids]
    assert "".join(pushed) + stream.flush() == tok.decode(ids) == split_decode(tok, ids)


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_stream_of_random_ids(tok, seed):
    rng = random.Random(seed)
    high = [id for id in range(tok.vocab_size) if tok.token_bytes(id)[0] >= 0x80]  # parts of UTF-8, often broken
    pool = high * 2 + list(tok.control.values()) + list(range(0, tok.vocab_size, 9))
    assert_streams(tok, rng.choices(pool, k=rng.randrange(12)))


@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=12) | st.lists(st.sampled_from(b"\xe0\xed\xf0\xf4\x80\x9f\xa0\xc0A"), max_size=8))
def test_stream_of_random_bytes(tok, data):
    id_of = {tok.token_bytes(id): id for id in reversed(range(tok.vocab_size))}
    ids = [id_of[bytes([b])] for b in data]
    assert_streams(tok, ids)
    assert tok.decode(ids) == bytes(data).decode("utf-8", "replace")


@settings(max_examples=100, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd")))
def test_stream_of_valid_text_never_breaks_a_character(tok, text):
    stream, seen, raw = tok.stream(), "", b""
    for id in tok.encode(text):
        seen += stream.push(id)
        raw += tok.token_bytes(id)
        assert seen == raw.decode("utf-8", "ignore")  # all whole characters so far: none broken, none held back
    assert seen == text and stream.flush() == ""


def test_stream_flush_and_control(tiktoken_tok):
    tok, bos = tiktoken_tok, tiktoken_tok.control["[BOS]"]
    half, rest = 256 + MERGES.index(HALF), HAN[2]
    stream = tok.stream()
    assert [stream.push(half), stream.push(rest)] == ["", "中"]
    assert [stream.push(half), stream.push(bos), stream.push(rest)] == ["", "\ufffd[BOS]", "\ufffd"]
    assert [stream.push(half), stream.flush(), stream.flush()] == ["", "\ufffd", ""]
    assert stream.push(65) == "A"  # after flush it starts anew


@settings(max_examples=300, deadline=None)
@given(before=st.lists(st.sampled_from("a中🙂").map(str.encode) | st.binary(max_size=3), max_size=4), more=st.data())
def test_stream_after_a_prompt(tok, before, more):
    """A character that the prompt began belongs to the answer where that completes it, and shows nowhere else."""
    np = pytest.importorskip("numpy")
    id_of = {tok.token_bytes(id): id for id in reversed(range(tok.vocab_size))}
    rest = [b"\xb8", b"\xad", b"\x9f\x99\x82", b"\x99", b"\x82", b"A", "中".encode(), b"[BOS]"]
    after = b"".join(more.draw(st.lists(st.sampled_from(rest), max_size=5)))
    before = b"".join(before)
    first, then = ([id_of[bytes([b])] for b in part] for part in (before, after))
    stream = tok.stream(np.array(first, dtype=np.int64))
    got = "".join(stream.push(id) for id in then) + stream.flush()
    whole = codecs.getincrementaldecoder("utf-8")("replace")
    whole.decode(before)
    (pending, _) = whole.getstate()
    completed = len(pending) and any(begins(pending + after[:n]) for n in range(1, len(after) + 1))
    assert got == ((pending if completed else b"") + after).decode("utf-8", "replace")


def begins(data):
    """Whether data is one character, or the first bytes of one."""
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError as e:
        return e.start == 0 and e.reason == "unexpected end of data"


def test_stream_after_half_a_character(tiktoken_tok):
    tok, bos = tiktoken_tok, tiktoken_tok.control["[BOS]"]
    half, rest = 256 + MERGES.index(HALF), HAN[2]
    assert tok.stream([65] * 1_000_000 + [half]).push(rest) == "中"
    for id, text in (65, "A"), (bos, "[BOS]"), (half, ""):
        assert tok.stream([65, half]).push(id) == text
    assert tok.stream([half]).flush() == "" and tok.stream([half, bos]).push(rest) == "\ufffd"
    stream = tok.stream([half])
    assert [stream.push(rest), stream.push(half), stream.flush()] == ["中", "", "\ufffd"]
    stream = module.TextStream(tok, (), [half, tok.vocab_size])  # a row of padding in the output layer
    assert stream.push(rest) == ("\ufffd", False)


def test_every_id_decodes(tok):
    for id in range(tok.vocab_size):
        assert tok.decode([id]) == tok.token_bytes(id).decode("utf-8", "replace")


def test_decode_takes_array_integers(tok):
    np = pytest.importorskip("numpy")
    assert tok.decode(np.array(tok.encode("the 中 cat"))) == "the 中 cat"


@pytest.mark.parametrize("offset", [0, 1, 10**6])
def test_id_out_of_range(tok, offset):
    for id in (tok.vocab_size + offset, -1 - offset):
        for call in (tok.token_bytes, tok.stream().push, lambda id: tok.decode([0, id])):
            with pytest.raises(ValueError, match=f"token id {id} is out of range: .* 0..{tok.vocab_size - 1}$"):
                call(id)


# ---- folders and files ----


def write_both(folder, data, **ids):
    """A tiktoken.model that names slots 0 and 7, and the tokenizer.json of `data` with the added tokens {name: id}."""
    write_tiktoken(folder, BYTES, {256: "[BOS]", 263: "<|end_of_msg|>"})
    entry = {**data["added_tokens"][0], "special": True}
    return write_json(folder, {**data, "added_tokens": [{**entry, "id": id, "content": n} for n, id in ids.items()]})


@pytest.mark.parametrize("ids", [{}, {"[BOS]": 256, "<|end_of_msg|>": 263}, {"[BOS]": 256, "<|new|>": 258}])
def test_tiktoken_is_preferred(tmp_path, data, ids):
    pytest.importorskip("tiktoken")
    tok = Tokenizer.from_pretrained(str(write_both(tmp_path, data, **ids)))
    assert tok.vocab_size == 512 and tok.encode("the") == list(b"the") and tok.control["<|end_of_msg|>"] == 263


@pytest.mark.parametrize(
    "ids, example",
    [
        ({"[BOS]": 256, "<|end_of_msg|>": 257}, "on 1 control ids: 257 is '<|end_of_msg|>' here"),  # field note 21
        ({"[BOS]": 263}, "263 is '[BOS]' here and '<|end_of_msg|>' there"),
        ({"<|new|>": 263, "[BOS]": 3}, "on 2 control ids: 263 is '<|new|>' here and '<|end_of_msg|>' there"),
        ({"<|new|>": 3}, "3 is '<|new|>' here and 'an ordinary token' there"),
    ],
)
def test_two_files_that_disagree(tmp_path, data, ids, example):
    pytest.importorskip("tiktoken")
    with pytest.raises(ValueError, match="tokenizer.json: disagrees with tiktoken.model") as e:
        Tokenizer.from_pretrained(write_both(tmp_path, data, **ids))
    assert example in str(e.value) and "\n" not in str(e.value)


def test_both_files_without_the_package(tmp_path, data, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r'tiktoken.model: .*pip install -e "\.\[tiktoken\]"'):
        Tokenizer.from_pretrained(write_both(tmp_path, data))


def test_tiktoken_without_config(tmp_path):
    pytest.importorskip("tiktoken")
    tok = Tokenizer.from_pretrained(write_tiktoken(tmp_path, BYTES))
    assert tok.control == {f"<|reserved_token_{id}|>": id for id in range(256, 512)}
    assert tok.encode("aé") == list("aé".encode())


def test_missing(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere: no such folder"):
        Tokenizer.from_pretrained(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"no tokenizer\.json and no tiktoken\.model"):
        Tokenizer.from_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json: no such folder"):
        Tokenizer.from_pretrained(tmp_path / "tokenizer.json")


def test_tiktoken_not_installed(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ValueError, match=r'tiktoken.model: .*pip install -e "\.\[tiktoken\]"'):
        Tokenizer.from_pretrained(write_tiktoken(tmp_path, BYTES))


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "only byte-level BPE"),
        (lambda d: d.update(model={"type": "WordLevel", "vocab": {}}), "WordLevel.* only byte-level BPE"),
        (lambda d: d.pop("model"), "not laid out as a tokenizer.json"),
        (lambda d: d.update(model=[]), "not laid out as a tokenizer.json"),
        (lambda d: d.update(model={"merges": []}), "not laid out as a tokenizer.json"),
        (lambda d: d["added_tokens"][0].pop("id"), "not laid out as a tokenizer.json"),
        (lambda d: d["added_tokens"][0].update(content=""), "control token '' with id 0"),
        (lambda d: d["added_tokens"][0].update(content="[PAD]"), r"control token '\[PAD\]'"),
        (lambda d: d["added_tokens"][0].update(id=1), r"control token '\[EOS\]' with id 1"),
        (lambda d: d["model"]["vocab"].update(Ġnew=70), "same id"),
        (lambda d: d["model"]["vocab"].pop("A"), "no token for byte 0x41"),
        (lambda d: d["added_tokens"][0].update(id=d["model"]["vocab"]["Ġ"]), "no token for byte 0x20"),
        (lambda d: d["added_tokens"][0].update(id=max(d["model"]["vocab"].values())), "is not an ordinary token"),
        (lambda d: d["model"]["merges"].append("q q"), "merge 'q q' needs 'qq', which is not an ordinary token"),
        (lambda d: d["model"]["merges"].append(["qq", ""]), "which is not an ordinary token"),
        (lambda d: d["model"]["merges"].append(5), "not laid out as a tokenizer.json"),
        (lambda d: d.update(normalizer={"type": "Nonsense"}), "cannot be built"),
        (lambda d: d["added_tokens"][0].update(special=False, content="the"), "added token 'the' has id 0"),
        (lambda d: d["added_tokens"][0].update(special=False, id=70), r"added token '\[BOS\]' has id 70"),
    ],
)
def test_bad_json(tmp_path, data, change, message):
    change(data)
    with pytest.raises(ValueError, match=message) as e:
        Tokenizer.from_pretrained(write_json(tmp_path, data))
    assert str(e.value).startswith(str(tmp_path / "tokenizer.json")) and "\n" not in str(e.value)


@pytest.mark.parametrize(
    "text, message",
    [(b'{\n"model": no}', "malformed JSON .*line 2"), (b"\xff", "malformed JSON"), (b"[]", "not laid out")],
)
def test_malformed_json(tmp_path, text, message):
    (tmp_path / "tokenizer.json").write_bytes(text)
    with pytest.raises(ValueError, match=f"tokenizer.json: .*{message}"):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda lines: lines.__setitem__(6, b"*** 6"), r"tiktoken.model:7: expected `base64 rank`, found .*\*\*\*"),
        (lambda lines: lines.__setitem__(6, b"Bg=="), r"tiktoken.model:7: expected `base64 rank`"),
        (lambda lines: lines.__setitem__(6, b"Bg== six"), r"tiktoken.model:7: expected `base64 rank`"),
        (lambda lines: lines.append(b"QQ== 256"), r"tiktoken.model:257: token b'A' already has rank 65"),
        (lambda lines: lines.append(b"QUE= 255"), "257 ranks are not 0..256"),
        (lambda lines: lines.append(b"QUE= 257"), "257 ranks are not 0..256"),
        (lambda lines: lines.__setitem__(65, b"QUE= 65"), "no token for byte 0x41"),
        (lambda lines: lines.clear(), "no token for byte 0x00"),
    ],
)
def test_bad_tiktoken_model(tmp_path, change, message):
    pytest.importorskip("tiktoken")
    lines = (write_tiktoken(tmp_path, BYTES) / "tiktoken.model").read_bytes().splitlines()
    change(lines)
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "config, message",
    [
        ('{"added_tokens_decoder": {"255": {"content": "[A]"}}}', "names id 255, not .* control slots 256..511"),
        ('{"added_tokens_decoder": {"512": {"content": "[A]"}}}', "names id 512, not .* control slots 256..511"),
        ('{"added_tokens_decoder": {"first": {"content": "[A]"}}}', "added_tokens_decoder is not"),
        ('{"added_tokens_decoder": {"256": {}}}', "added_tokens_decoder is not"),
        ('{"added_tokens_decoder": ["[A]"]}', "added_tokens_decoder is not"),
        ('{"added_tokens_decoder": {"256": {"content": 5}}}', "control token 5 with id 256"),
        ('{"added_tokens_decoder": {"256": {"content": "<|reserved_token_300|>"}}}', "token_300.* given twice"),
        ("{\n\n,}", "malformed JSON .*line 3"),
        ("[]", "added_tokens_decoder is not"),
    ],
)
def test_bad_tokenizer_config(tmp_path, config, message):
    pytest.importorskip("tiktoken")
    (write_tiktoken(tmp_path, BYTES) / "tokenizer_config.json").write_text(config)
    with pytest.raises(ValueError, match="tokenizer_config.json: .*" + message):
        Tokenizer.from_pretrained(tmp_path)
