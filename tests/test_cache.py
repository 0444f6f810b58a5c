"""The page pool: how large a page is, who holds it, what its two views share, and which rows a batch points at."""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from helpers import CASES, case, perturb, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Batch, Chunk, PagePool, page_size, state_bytes
from kda import KDA
from mla import gather_rows
from model import K3Config

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
TINY = tiny_config()


def layers(kda, mla):
    """tiny_config with so many KDA and MLA layers."""
    attn = dict(kda_layers=list(range(1, kda + 1)), full_attn_layers=list(range(kda + 1, kda + mla + 1)))
    return tiny_config(linear=attn, num_hidden_layers=kda + mla)


# ---------------------------------------------------------------- the size of a page


def test_k3_page():
    """The design's own check: 1,536 tokens at TP8 with an FP8 latent, 24 slabs, 3 groups of 23 layers."""
    k3 = K3Config.k3()
    assert page_size(k3, BF16, FP8, tp=8) == 1536
    assert page_size(k3, BF16, tp=8) == 768
    assert page_size(k3, BF16) == 5760
    pool = PagePool(k3, 2, BF16, "meta")
    assert pool.slabs.shape == (24, 2, 5760 * 576 * 2) and pool.page_bytes == 24 * 5760 * 576 * 2
    assert pool.groups == 3 and Counter(map(pool.group, range(69))) == {0: 23, 1: 23, 2: 23}
    places = {(pool.group(i), pool.state(i)[0].storage_offset()) for i in range(69)}
    assert len(places) == 69, "two KDA layers share a slab of a page"


@pytest.mark.parametrize("name", CASES)
def test_page_of_the_cases(name):
    assert page_size(case(name)[0].cfg, torch.float32) == 128


@given(
    sizes=st.tuples(*[st.integers(1, 8), st.integers(1, 40), st.integers(2, 5), st.integers(1, 40), st.integers(0, 9)]),
    dtype=st.sampled_from([BF16, torch.float32, torch.float64]),
    latent=st.sampled_from([None, FP8, BF16, torch.float32]),
    tp=st.sampled_from([1, 2, 4]),
)
@settings(max_examples=200, deadline=None)
def test_page_is_the_fewest_tokens_that_hold_a_state(sizes, dtype, latent, tp):
    h, d, taps, rank, rope = sizes
    attn = dict(num_heads=h * tp, head_dim=d, short_conv_kernel_size=taps)
    cfg = tiny_config(linear=attn, kv_lora_rank=rank, qk_rope_head_dim=rope)
    S = torch.empty(h, d, d, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    conv, row = torch.empty(taps - 1, 3 * h * d, dtype=dtype), torch.empty(rank + rope, dtype=latent or dtype)
    assert state_bytes(cfg, dtype, tp) == S.nbytes + conv.nbytes
    enough = (P for P in itertools.count(128, 128) if P * row.nbytes >= S.nbytes + conv.nbytes)
    assert page_size(cfg, dtype, latent, tp) == next(enough)


# ---------------------------------------------------------------- who holds a page


@given(st.integers(0, 9), st.lists(st.tuples(st.booleans(), st.integers(0, 10)), max_size=30))
@settings(deadline=None)
def test_no_page_is_given_twice_or_lost(num_pages, moves):
    pool, held = PagePool(TINY, num_pages), []
    for take, n in moves:
        if not take:
            pool.release(held[:n])
            held = held[n:]
        elif n <= num_pages - len(held):
            pages = pool.allocate(n).tolist()
            assert len(pages) == n and set(pages) <= set(range(num_pages)) - set(held)
            held += pages
            assert len(set(held)) == len(held)
        else:
            with pytest.raises(MemoryError, match=f"{num_pages - len(held)} free pages of {num_pages}, {n} were"):
                pool.allocate(n)
        assert pool.free_pages == num_pages - len(held)
        assert pool.references.tolist() == [int(p in held) for p in range(num_pages)]


def test_a_page_is_free_when_its_last_holder_drops_it():
    pool = PagePool(TINY, 2)
    pages = pool.allocate(2)
    pool.references[pages[0]] += 1  # a second holder
    pool.release(pages)
    assert pool.free_pages == 1 and pool.references[pages[0]] == 1
    pool.release(pages[:1])
    assert pool.free_pages == 2


def test_a_page_that_is_released_twice_at_once_is_free_once():
    pool = PagePool(TINY, 3)
    page = pool.allocate(1)
    pool.retain(page)
    assert pool.release([page[0], page[0]]) == page.tolist() and pool.free_pages == 3
    assert sorted(pool.allocate(3).tolist()) == [0, 1, 2]


@pytest.mark.parametrize("again", [[0], [1, 1]])
def test_releasing_too_often_is_noticed(again):
    pool = PagePool(TINY, 3)
    pool.release(pool.allocate(3))
    pool.references[1] = 1
    with pytest.raises(AssertionError, match="released more often"):
        pool.release(again)


@pytest.mark.parametrize("kda, mla, groups", [(6, 3, 2), (5, 2, 3), (1, 3, 1), (3, 0, 3), (0, 2, 0)])
def test_pages_for(kda, mla, groups):
    pool = PagePool(layers(kda, mla), 0)
    P = pool.page_size
    wanted = {0: 0, 1: 1, P - 1: 1, P: 1, P + 1: 2, 3 * P: 3, 3 * P + 1: 4}
    assert {n: pool.pages_for(n) for n in wanted} == {n: pages + groups for n, pages in wanted.items()}


def test_scrub_zeroes_whole_pages_and_no_others():
    pool = PagePool(TINY, 5)
    pool.slabs.fill_(255)
    pool.scrub([3, np.int64(0)])
    assert (pool.slabs[:, [0, 3]] == 0).all() and (pool.slabs[:, [1, 2, 4]] == 255).all()


# ---------------------------------------------------------------- two views of the same bytes


@pytest.mark.parametrize("dtype", [BF16, torch.float32, torch.float64])
@pytest.mark.parametrize("kda, mla", [(6, 3), (5, 2), (1, 3), (4, 1), (3, 0), (0, 2)])
def test_nothing_that_is_written_is_overwritten(kda, mla, dtype):
    """Two sequences' states and three history pages of every layer, written one after another, all read back."""
    count = 2 * -(-kda // max(mla, 1)) + 4
    pool = PagePool(layers(kda, mla), count, dtype)
    P, pages = pool.page_size, torch.randperm(count, generator=torch.Generator().manual_seed(0))
    untouched, history = pages[-4], pages[-3:]
    pool.slabs.fill_(255)
    places = [view[pages[2 * pool.group(i) + s]] for i in range(kda) for s in range(2) for view in pool.state(i)]
    places += [pool.rows(i)[page * P : page * P + P] for i in range(mla) for page in history]
    values = [torch.randn(place.shape).to(place.dtype) for place in places]
    for place, value in zip(places, values):
        place.copy_(value)
    assert all(torch.equal(place, value) for place, value in zip(places, values))
    assert (pool.slabs[:, untouched] == 255).all()


def test_state_views_have_the_layers_shapes():
    pool = PagePool(TINY, 4, BF16)
    S, conv = pool.state(2)
    assert (S.shape, S.dtype) == ((4, 3, 20, 20), torch.float32)
    assert (conv.shape, conv.dtype) == ((4, 3, 3 * 3 * 20), BF16)
    assert (pool.rows(1).shape, pool.rows(1).dtype) == ((4 * pool.page_size, 24 + 8), BF16)


# ---------------------------------------------------------------- the rows of a batch


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 1, 2, 127, 128, 255])), min_size=1, max_size=8))
@settings(deadline=None)
def test_a_batch_points_at_its_own_rows(sizes):
    pool = PagePool(TINY, 64)
    P, ids = pool.page_size, np.random.default_rng(0).permutation(64)
    chunks = [Chunk(n, past, *ids[8 * i : 8 * i + 8].reshape(4, 2)[[0, 1, 2]]) for i, (n, past) in enumerate(sizes)]
    for c in chunks:
        c.pages = np.concatenate([c.pages, c.src[:1]])  # three pages: enough for 255 + 4 tokens
    batch = Batch.paged(pool, chunks)
    rows = [[c.pages[i // P] * P + i % P for i in range(c.past + c.tokens)] for c in chunks]
    assert batch.slots.tolist() == [r for c, own in zip(chunks, rows) for r in own[c.past :]]

    todo, start = list(zip(chunks, rows)), 0
    for part in batch.parts:
        mine, todo = todo[: len(part.lengths)], todo[len(part.lengths) :]
        assert part.rows == slice(start, start := start + sum(part.lengths))
        assert part.lengths == [c.tokens for c, _ in mine] and part.past.tolist() == [c.past for c, _ in mine]
        assert part.src.tolist() == [c.src.tolist() for c, _ in mine]
        assert part.dst.tolist() == [c.dst.tolist() for c, _ in mine]
        slab = torch.arange(64 * P)[:, None]  # each row holds its own number
        for first, last, T, _ in part.runs:
            seen, mask = gather_rows(slab, part, first, last, T, None, torch.int64)
            for b, (c, own) in enumerate(mine[first:last]):
                assert c.tokens == T and seen[b, : len(own), 0].tolist() == own
                assert set(seen[b, len(own) :, 0].tolist()) <= {own[0]}, (
                    "rows of nobody, which may hold a NaN, are read"
                )
                assert mask[b].tolist() == [[j <= c.past + t for j in range(seen.shape[1])] for t in range(T)]
    assert not todo


def test_decode_rows_come_first_and_equal_neighbours_run_together():
    pool, state = PagePool(TINY, 8), np.array([7, 6])
    chunks = [Chunk(n, 5, np.array([0]), state, state) for n in (1, 1, 1, 2, 2, 9)]
    decode, prompt = Batch.paged(pool, chunks).parts
    assert decode.decode and decode.rows == slice(0, 3) and decode.runs == [(0, 3, 1, slice(0, 3))]
    assert not prompt.decode and prompt.rows == slice(3, 16)
    assert prompt.runs == [(0, 2, 2, slice(0, 4)), (2, 3, 9, slice(4, 13))]
    assert prompt.starts.tolist() == [0, 2, 4, 13]


def test_pieces_of_one_text_wait_for_each_other():
    """A piece that follows reads the state that the one before it writes, also where either is a single token."""
    pool, old, a, b = PagePool(TINY, 8), *np.arange(6).reshape(3, 2)
    chunks = [
        Chunk(1, 0, old, a, a),
        Chunk(1, 5, old, old, a),
        Chunk(1, 6, old, a, b, True),
        Chunk(1, 7, old, b, b, True),
    ]
    decode, prompt = Batch.paged(pool, chunks).parts
    assert decode.lengths == [1] and prompt.lengths == [1, 1, 1] and not prompt.decode
    assert prompt.runs == [(i, i + 1, 1, slice(i, i + 1)) for i in range(3)]
    table, chains = Batch.paged(pool, [*chunks, Chunk(70, 0, old, a, a)]).parts[1].chunks(64)
    assert table.tolist() == [[0, 1, 0, 1], [1, 1, 1, 1], [2, 1, 2, 1], [3, 64, 3, 0], [67, 6, 3, 1]]
    assert chains.tolist() == [0, 3, 5]


def test_state_moves_from_src_to_dst():
    """The page that is read stays as it was; a sequence without a past reads zeros, whatever lies in its page."""
    cfg = tiny_config()
    pool, layer = PagePool(cfg, 8), perturb(KDA(cfg, 0))
    pool.slabs.fill_(255)  # NaN
    S, conv = pool.state(0)
    S[2], conv[2] = 0.5, 0.25
    src, dst = np.array([[2], [3]]), np.array([[4], [5]])
    x = torch.randn(2, cfg.hidden_size)
    chunks = [Chunk(1, past, np.array([0]), *pages) for past, *pages in zip((7, 0), src, dst)]
    with torch.no_grad():
        out = layer(x, Batch.paged(pool, chunks))
        fresh = layer(x[1:], Batch.whole(1, 1))
    assert (S[2] == 0.5).all() and (conv[2] == 0.25).all() and S[3].isnan().all()
    assert (conv[4, :2] == 0.25).all() and not conv[4].isnan().any() and not S[4].isnan().any()
    assert (conv[5, :2] == 0).all() and torch.allclose(out[1], fresh[0], atol=1e-6)
