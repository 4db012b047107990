import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import numerics
from kvgraft_jax import reference
from kvgraft_jax import sampling
import model_helpers

_IDS = model_helpers.tokens(150)


@pytest.fixture(scope='module')
def model():
  return model_helpers.tiny()


@pytest.fixture(scope='module')
def fresh(model):
  """The prompt, computed once; tests fork it and never extend it."""
  context = model.prefill(_IDS)
  context.logits()
  return context


def _state(context):
  return (list(context.tokens), context.tokens_computed,
          context.tokens_restored, model_helpers.cache_sha256(context),
          context.logits_sha256())


@pytest.mark.parametrize('dtype,tolerance', [
    ('float32', 1e-4), ('bfloat16', 0.3)])
def test_prefill_against_the_reference(dtype, tolerance):
  model = model_helpers.tiny(dtype)
  rows = [0, 1, 15, 16, 22, 23, 24, 31, 32, 63, 64, 100, 149]
  got = model.context().logits_of(_IDS, rows)
  params = jax.tree.map(np.asarray, model.params)
  want = reference.logits(
      params, model.config, _IDS, rows, dtype=np.float64,
      round_embedding_scale=dtype == 'bfloat16')
  np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


# One SHA-256 for every schedule.


def test_chunks_and_tiles_give_one_hash(model, fresh):
  assert all(model_helpers.tiny().self_test().invariances[n]
             for n in ('chunk', 'tile')), 'see selftest_test'
  want = (fresh.logits_sha256(), _rows(fresh))
  for chunk, tile in ((32, 16), (64, 8)):
    other = model_helpers.variant(model, chunk=chunk, tile=tile).prefill(_IDS)
    assert other.tokens_computed == len(_IDS)
    assert (other.logits_sha256(), _rows(other)) == want, (chunk, tile)


def _rows(context):
  """Visible cache bits, whatever the ring's size."""
  return model_helpers.cache_sha256(context)


@pytest.mark.slow  # 5 s.
def test_another_page_gives_other_bits(model, fresh):
  # Shows that the hash is sensitive to the order of operations.
  other = model_helpers.variant(model, page=32).prefill(_IDS)
  assert other.logits_sha256() != fresh.logits_sha256()
  np.testing.assert_allclose(other.logits(), fresh.logits(), atol=0.1)


@pytest.mark.parametrize('cuts', [
    [1], [31], [32], [33], [97], [1, 2, 3], [24, 48, 64, 65], [149]])
def test_splits_give_one_hash(model, fresh, cuts):
  context = model.context()
  for start, stop in zip([0, *cuts], [*cuts, len(_IDS)]):
    context.extend(_IDS[start:stop])
  assert context.tokens_computed == len(_IDS)
  assert context.logits_sha256() == fresh.logits_sha256()
  assert _rows(context) == _rows(fresh)


def test_token_by_token_gives_one_hash(model, fresh):
  context = model.prefill(_IDS[:90])
  for token in _IDS[90:]:
    context.append(token)
    context.compute()
  assert context.logits_sha256() == fresh.logits_sha256()
  assert _rows(context) == _rows(fresh)


def test_two_runs_and_two_capacities_give_one_hash(model, fresh):
  again = model.prefill(_IDS)
  assert again.cache.capacity == fresh.cache.capacity == 256
  assert _state(again) == _state(fresh)
  wide = model.context()
  wide._cache = model.programs.empty_cache(1, 512)
  wide.extend(_IDS)
  assert wide.cache.capacity == 512
  assert wide.logits_sha256() == fresh.logits_sha256()
  assert _rows(wide) == _rows(fresh)


def test_growth_across_a_bucket_is_exact(model):
  ids = model_helpers.tokens(240, seed=1)
  assert model.slots_for(224) == 256 and model.slots_for(225) == 512
  whole = model.prefill(ids)
  assert whole.cache.capacity == 512
  grown = model.prefill(ids[:200])
  assert grown.cache.capacity == 256
  grown.extend(ids[200:])
  assert grown.cache.capacity == 512
  assert grown.logits_sha256() == whole.logits_sha256()
  assert _rows(grown) == _rows(whole)


def test_record_does_not_change_bits(model, fresh):
  assert model.prefill(_IDS, record=False).logits_sha256() == (
      fresh.logits_sha256())


def test_logits_of_rows_equals_prefixes(model, fresh):
  rows = model.context().logits_of(_IDS, [0, 31, 32, 149])
  assert hashing.logits_sha256(rows[3]) == fresh.logits_sha256()
  for row, n in zip(rows, (1, 32, 33)):
    assert hashing.logits_sha256(row) == model.prefill(
        _IDS[:n]).logits_sha256()


def test_a_fork_is_independent(model, fresh):
  before = _state(fresh)
  a, b = fresh.fork(), fresh.fork()
  a.extend([7, 8, 9])
  b.extend([9, 8, 7])
  assert a.logits_sha256() != b.logits_sha256()
  assert _state(fresh) == before
  assert a.logits_sha256() == model.prefill(_IDS + [7, 8, 9]).logits_sha256()


# Generation.


def test_greedy_is_the_argmax_of_fresh_prefills(model, fresh):
  ids, want = list(_IDS), []
  for _ in range(6):
    want.append(int(model.prefill(ids).logits().argmax()))
    ids.append(want[-1])
  context, seen = fresh.fork(), []
  found, = context.generate(
      6, stop_ids=(), on_token=lambda i, t: seen.append((i, t)))
  assert found.token_ids == want
  assert seen == [(0, t) for t in want]
  assert found.finish_reason == 'length'
  assert found.logits_sha256 == fresh.logits_sha256()
  assert context.tokens == _IDS + want
  assert context.logits_sha256() == model.prefill(_IDS + want).logits_sha256()


def test_sampling_alone_equals_sampling_in_a_batch(model, fresh):
  options = {'temperature': 1.5, 'top_k': 50, 'top_p': 0.95, 'seed': 11,
             'stop_ids': ()}
  before, seen = _state(fresh), []
  batch = fresh.generate(
      12, num_samples=5, on_token=lambda i, t: seen.append((i, t)), **options)
  assert _state(fresh) == before
  assert len({tuple(g.token_ids) for g in batch}) == 5
  params = sampling.SamplingParams(1.5, 50, 0.95, 11)
  for i, found in enumerate(batch):
    assert [t for j, t in seen if j == i] == found.token_ids
    context, alone = fresh.fork(), []
    for _ in range(12):
      alone.append(sampling.sample(
          context.logits(), temperature=params.temperature,
          top_k=params.top_k, top_p=params.top_p, seed=params.seed,
          sample_index=i, position=context.length))
      context.extend(alone[-1:])
    assert found.token_ids == alone, i
    assert found.logits_sha256 == fresh.logits_sha256()
  single, = fresh.fork().generate(12, **options)
  assert single.token_ids == batch[0].token_ids


def test_another_seed_draws_otherwise(fresh):
  def draw(seed):
    return fresh.generate(
        8, temperature=2.0, seed=seed, num_samples=2, stop_ids=())
  assert draw(1) == draw(1)
  assert draw(1) != draw(2)


def test_stop_ids_end_a_sample_and_are_no_part_of_it(fresh):
  options = {'temperature': 1.5, 'seed': 3}  # Greedy repeats itself here.
  whole, = fresh.fork().generate(8, stop_ids=(), **options)
  stop = next(t for i, t in enumerate(whole.token_ids)
              if i >= 2 and t not in whole.token_ids[:i])
  cut = whole.token_ids.index(stop)
  context = fresh.fork()
  found, = context.generate(8, stop_ids=[stop], **options)
  assert found.finish_reason == 'stop'
  assert found.token_ids == whole.token_ids[:cut]
  assert context.tokens == _IDS + whole.token_ids[:cut]
  batch = fresh.generate(8, num_samples=2, stop_ids=[stop], **options)
  assert batch[0] == found


def test_generation_ends_where_the_capacity_does(fresh):
  small = model_helpers.tiny(capacity=153)
  context = small.prefill(_IDS)
  found, = context.generate(10, stop_ids=())
  assert found.finish_reason == 'capacity' and len(found.token_ids) == 3
  assert found.token_ids == fresh.fork().generate(
      3, stop_ids=())[0].token_ids
  assert context.length == 153
  more, = context.generate(10, stop_ids=())
  assert more.token_ids == [] and more.finish_reason == 'capacity'
  with pytest.raises(errors.CapacityError, match='154 tokens .* 153'):
    context.extend([5])


@pytest.mark.parametrize('options,message', [
    ({'max_new_tokens': 0}, 'max_new_tokens'),
    ({'num_samples': 0}, 'num_samples'),
    ({'temperature': -1.0}, 'temperature'),
    ({'top_p': 0.0}, 'top_p'),
    ({'top_k': -1}, 'top_k'),
])
def test_generate_refuses(fresh, options, message):
  before = _state(fresh)
  with pytest.raises(errors.UsageError, match=message):
    fresh.generate(**options)
  assert _state(fresh) == before


# Scores.


def test_score_is_the_log_softmax_of_the_logits(model, fresh):
  before, tail = _state(fresh), [9, 88, 300, 12, 7, 7]
  found = fresh.score(tail)
  assert _state(fresh) == before
  rows = np.concatenate(
      [fresh.logits()[None], fresh.fork().logits_of(tail[:-1])])
  wide = rows.astype(np.float64)
  want = wide[np.arange(6), tail] - np.log(np.exp(wide).sum(-1))
  np.testing.assert_allclose(found.logprobs, want, rtol=0, atol=1e-9)
  assert found.logprob == pytest.approx(sum(found.logprobs))
  assert fresh.score(tail[:1]).logprobs == found.logprobs[:1]


def test_score_against_the_reference():
  model = model_helpers.tiny('float32')
  tail = [9, 88, 300, 12, 7]
  found = model.prefill(_IDS).score(tail)
  rows = range(len(_IDS) - 1, len(_IDS) + 4)
  wide = reference.logits(
      jax.tree.map(np.asarray, model.params), model.config, _IDS + tail, rows,
      dtype=np.float64)
  want = wide[np.arange(5), tail] - np.log(np.exp(wide).sum(-1))
  np.testing.assert_allclose(found.logprobs, want, rtol=0, atol=1e-4)


# Refusals leave the context as it was.


@pytest.mark.parametrize('bad,found', [
    (320, '320'), (-1, '-1'), (True, 'True'), (3.0, '3.0'), ('a', "'a'"),
    (None, 'None'), (np.float32(3), '3.0'),
])
def test_bad_token_ids_are_refused(fresh, bad, found):
  before = _state(fresh)
  for call in (fresh.extend, fresh.score, fresh.logits_of, fresh.hidden_of,
               lambda t: fresh.append(t[1])):
    with pytest.raises(errors.UsageError, match=r'tokens\[.*found.*' + found):
      call([5, bad])
  assert _state(fresh) == before


def test_numpy_ids_are_accepted(model, fresh):
  context = model.prefill(np.asarray(_IDS, np.int64))
  assert context.logits_sha256() == fresh.logits_sha256()
  assert all(type(t) is int for t in context.tokens)


def test_too_many_tokens_are_refused(model, fresh):
  before = _state(fresh)
  with pytest.raises(errors.CapacityError, match='4150 tokens .* 4096'):
    fresh.extend([5] * 4000)
  with pytest.raises(errors.CapacityError, match='4097 tokens'):
    model.prefill([5] * 4097)
  assert _state(fresh) == before


@pytest.mark.parametrize('capacity', [0, -1, 4097])
def test_impossible_capacity_is_refused(capacity):
  with pytest.raises(errors.CapacityError, match='capacity: expected 1 to'):
    engine.load_model('tiny:0', capacity=capacity, self_test=False)


def test_empty_contexts_have_no_logits(model):
  for call in (lambda: model.context().logits(),
               lambda: model.prefill([]).logits_sha256(),
               lambda: model.context().score([5]),
               lambda: model.context().generate(2)):
    with pytest.raises(errors.UsageError, match='at least one token'):
      call()


def test_score_of_nothing_is_refused(fresh):
  with pytest.raises(errors.UsageError, match='at least one token to score'):
    fresh.score([])


@pytest.mark.parametrize('row', [-1, 2])
def test_rows_out_of_range_are_refused(fresh, row):
  before = _state(fresh)
  with pytest.raises(errors.UsageError, match='rows: expected 0 to 1, found'):
    fresh.logits_of([5, 6], [row])
  assert _state(fresh) == before


def test_weights_that_are_not_finite_are_reported(model):
  broken = copy.copy(model)
  scale = model.params['final_norm']['scale']
  broken.params = dict(model.params, final_norm={
      'scale': scale.at[3].set(jnp.nan)})
  with pytest.raises(errors.NumericsError, match='position 149.*NaN'):
    broken.prefill(_IDS).logits()


def test_progress_counts_to_the_end(model):
  seen = []
  model.prefill(_IDS, progress=lambda *a: seen.append(a))
  assert seen[0] == (0, 150) and seen[-1] == (150, 150)
  assert [a for a, _ in seen] == sorted({a for a, _ in seen})


def test_dtypes_and_specs():
  assert model_helpers.tiny('float32').profile.dtype == 'float32'
  assert set(numerics.DTYPES) == set(model_helpers.DTYPES)
  with pytest.raises(errors.UsageError, match='dtype'):
    engine.load_model('tiny:0', dtype='float16')


def test_a_context_keeps_only_the_last_sliding_rows(model):
  ids = model_helpers.tokens(240, seed=1)
  whole, short = model.context(), model.context()
  short.keep_last(40)
  for context in (whole, short):
    for at in range(0, 240, 60):
      context.extend(ids[at:at + 60])
  assert short.logits_sha256() == whole.logits_sha256()
  for start, stop in ((200, 240), (203, 239), (210, 211)):
    for a, b in zip(short.sliding_rows(start, stop),
                    whole.sliding_rows(start, stop)):
      assert a.shape[1] == stop - start and a.tobytes() == b.tobytes()
  assert whole.sliding_rows(0, 240)[0].shape[1] == 240
  assert short._recorder.nbytes < whole._recorder.nbytes / 2
  with pytest.raises(errors.UsageError, match='expected a start from'):
    short.sliding_rows(0, 240)


def test_a_context_as_long_as_the_models_has_no_spare_slots(model):
  longest = model.config.max_context
  chunk = model.profile.chunk
  assert model.slots_for(longest) == longest + chunk
  assert model.slots_for(longest // 2) == longest
