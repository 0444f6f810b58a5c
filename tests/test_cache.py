"""The page pool: how large a page is, who holds it, what its two views share, and which rows a batch points at."""

import itertools
from collections import Counter
from dataclasses import astuple

import numpy as np
import pytest
import torch
from helpers import CASES, case, tiny_config
from hypothesis import given, settings
from hypothesis import strategies as st

from cache import Batch, Chunk, PagePool, page_size, state_bytes
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
    for seg in batch.segments:
        mine, todo = todo[: seg.B], todo[seg.B :]
        assert seg.rows == slice(start, start := start + seg.B * seg.T)
        assert seg.src.tolist() == [c.src.tolist() for c, _ in mine]
        assert seg.dst.tolist() == [c.dst.tolist() for c, _ in mine]
        assert seg.fresh == any(c.past == 0 for c, _ in mine) and seg.past.tolist() == [c.past for c, _ in mine]
        for b, (c, own) in enumerate(mine):
            seen, beyond = seg.history[b].tolist()[: len(own)], seg.history[b].tolist()[len(own) :]
            assert c.tokens == seg.T and seen == own
            assert set(beyond) <= {own[0]}, "rows of nobody, which may hold a NaN, are read"
            if seg.mask is not None:
                sees = [[j <= c.past + t for j in range(seg.history.shape[1])] for t in range(seg.T)]
                assert seg.mask[b].tolist() == sees
            else:  # plain causal over a whole sequence, or one token that sees all
                assert not beyond and (c.past == 0 or c.tokens == 1)
    assert not todo


def test_equal_neighbours_are_one_dense_problem():
    pool, state = PagePool(TINY, 8), np.array([7, 6])
    chunks = [Chunk(n, 5, np.array([0]), state, state) for n in (1, 1, 1, 2, 2, 9)]
    segments = Batch.paged(pool, chunks).segments
    assert [(seg.B, seg.T) for seg in segments] == [(3, 1), (2, 2), (1, 9)]
    x = torch.arange(16.0)[:, None].expand(16, 4)
    assert segments[1].dense(x)[..., 0].tolist() == [[3, 4], [5, 6]]
    assert astuple(Batch.whole(2, 3).segments[0])[:3] == (slice(0, 6), 2, 3)


def test_state_moves_from_src_to_dst():
    """The page that is read stays as it was; a sequence without a past reads zeros, whatever lies in its page."""
    pool = PagePool(TINY, 8)
    pool.slabs.fill_(255)
    S, conv = pool.state(0)
    S[2], conv[2] = 1.5, 2.5
    old, src, new = np.array([0]), np.array([2, 3]), np.array([4, 5])
    batch = Batch.paged(pool, [Chunk(1, 7, old, src, new), Chunk(1, 0, old, new, new)])
    past, state = batch.read_state(0, batch.segments[0])
    assert (state[0] == 1.5).all() and (past[0] == 2.5).all() and (state[1] == 0).all() and (past[1] == 0).all()
    batch.write_state(0, batch.segments[0], past[:1] + 1, state[:1] + 1)
    assert (S[2] == 1.5).all() and (conv[2] == 2.5).all() and (S[4] == 2.5).all() and (conv[4] == 3.5).all()
