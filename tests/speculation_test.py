"""Speculation: the same tokens, logits and cache as one token at a time."""

import copy
import dataclasses
import functools
import random

import pytest

import kvgraft_jax as kv
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import hashing
from kvgraft_jax import sampling
from kvgraft_jax import speculation
from kvgraft_jax import store as store_lib
import model_helpers

RING = 64  # Of the tiny model: window 24 and chunk 32, in pages of 16.
IDS = model_helpers.tokens(240)
# Greedy repeats itself behind these; the draws below only now and then.
MIXED = {'temperature': 1.0, 'top_k': 2, 'seed': 4}
COUNT = 2 * RING + 9  # Sliding rows leave the ring several times.
PROVEN = {'run': True, 'slot': True, 'neighbours': True, 'capacity': True,
          'tile': True, 'rows_4': True, 'rows_8': True, 'rows_16': True,
          'rows_32': True}


@pytest.fixture(scope='module')
def model():
  return model_helpers.exact()


@pytest.fixture
def chosen(monkeypatch):
  """Collects the hash of every row of logits that chooses a token."""
  found, plain = [], sampling.sample

  def sample(logits, **kwargs):
    found.append(hashing.logits_sha256(logits))
    return plain(logits, **kwargs)

  monkeypatch.setattr(sampling, 'sample', sample)
  return found


def refuting(model, *names):
  """Returns the same model where the self-test refuted these."""
  other = copy.copy(model)
  report = model.self_test()
  other._report = dataclasses.replace(
      report, invariances=report.invariances | dict.fromkeys(names, False))
  return other


def state(context):
  """All that a context is, its visible cache as bytes and its counters."""
  return (list(context.tokens), context._done, context.tokens_computed,
          context.tokens_restored,
          [array[:, slots].tobytes() for array, slots in
           model_helpers.visible_rows(
               context.model, context.cache, context._done)],
          context.logits_sha256())


def stored(artifact):
  """Returns id and digests of every block: equal for equal bytes."""
  return artifact.id, artifact.manifest.digests


# Guesses.


def newest(tokens):
  """Returns where the text goes on behind the last two, met before, or 0."""
  return next((at for at in range(len(tokens) - 1, 1, -1)
               if tokens[at - 2:at] == tokens[-2:]), 0)


def naive(tokens, most):
  """Returns what followed the newest earlier occurrence of the last two."""
  at = newest(tokens)
  return (tokens[at:] * most)[:most] if at else []


def test_the_guess_is_what_followed_the_newest_occurrence():
  lookup = speculation.Lookup(5, 5)
  tokens = [1, 2, 3, 1, 2, 4, 5, 6, 7, 1, 2]
  assert lookup.propose(tokens, 99) == [4, 5, 6, 7]
  assert lookup.propose(tokens, 2) == [4, 5]
  assert lookup.propose(tokens + [9], 99) == []
  assert lookup.propose(tokens + [9, 2, 3], 99) == [1, 2, 4, 5]


@pytest.mark.parametrize('tokens,want', [
    ([], []), ([1], []), ([1, 1], []), ([1, 2], []), ([1, 1, 1], [1] * 6),
    ([5, 1, 2, 1, 2], [1, 2, 1, 2, 1, 2]),
    ([1, 2, 3, 1, 2], [3, 1, 2, 3, 1, 2]),
])
def test_a_guess_at_the_end_of_the_text_goes_round(tokens, want):
  assert speculation.Lookup(7, 7).propose(tokens, 99) == want


def test_guesses_against_a_search_through_the_text():
  rng, kept = random.Random(5), 0
  for _ in range(60):
    tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 30))]
    lookup, back = speculation.Lookup(6, 6), 0
    while len(tokens) < 60:
      most = rng.randrange(1, 6)
      followed = len(tokens) - back
      want = naive(tokens, most)
      if back and tokens[followed - 2:followed] == tokens[-2:]:
        kept += 1
        want = (tokens[followed:] * 6)[:most]
      elif want:
        back = len(tokens) - newest(tokens)
      assert lookup.propose(tokens, most) == want
      tokens += [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
  assert kept > 20


def test_an_occurrence_is_followed_past_a_newer_one():
  lookup = speculation.Lookup(4, 4)
  tokens = [8, 1, 2, 3, 4, 5, 6, 9, 3, 4, 7, 8, 1]
  assert lookup.propose(tokens, 99) == [2, 3, 4]
  tokens += [2, 3, 4]  # The newest is in front of the 7.
  assert lookup.propose(tokens, 99) == [5, 6, 9]
  assert speculation.Lookup(4, 4).propose(tokens, 99) == [7, 8, 1]
  tokens += [3, 4]  # It agrees no more: back to the newest.
  assert lookup.propose(tokens, 99) == [3, 4, 3]


def test_only_a_tile_that_came_true_is_followed_by_a_longer_guess():
  lookup = speculation.Lookup(8, 4)
  tokens = [1, 2, 3] * 4
  assert lookup.propose(tokens, 99) == [1, 2, 3]
  tokens += [1, 2, 3, 1]
  assert lookup.propose(tokens, 99) == [2, 3, 1, 2, 3, 1, 2]
  tokens += [2, 3, 1, 9, 1, 2]  # A tile of it, and then something else.
  assert lookup.propose(tokens, 99) == [3, 1, 9, 1, 2, 3, 1]
  tokens += [3, 1, 1, 2]  # Less than a tile.
  assert len(lookup.propose(tokens, 99)) == 3
  assert lookup.propose(tokens + [9, 9], 99) == []
  # Nothing was guessed, so nothing has come true.
  assert len(lookup.propose(tokens + [9, 9, 9], 99)) == 3


@pytest.mark.parametrize('rows', [1, 2, 3])
def test_few_rows_guess_less_than_a_tile(rows):
  assert len(speculation.Lookup(rows, 4).propose([7] * 9, 99)) == rows - 1


# Which step programs may be used.


def test_only_proven_row_counts_are_used(model):
  profile = dataclasses.replace(model.profile, tile=4, chunk=32)
  counts = functools.partial(speculation.row_counts, profile)
  assert counts(PROVEN) == [4, 8, 16, 32]
  assert counts(PROVEN | {'rows_16': False, 'rows_8': None}) == [4, 32]
  assert counts(PROVEN | {'rows_2': True, 'rows_64': True}) == [4, 8, 16, 32]
  for name in ('run', 'slot', 'neighbours', 'capacity', 'tile'):
    assert counts(PROVEN | {name: False}) == [], name
    assert counts(PROVEN | {name: None}) == [], name
  assert counts({}) == []


@pytest.mark.parametrize('asked,tile,counts,want', [
    (None, 4, [4, 8, 16, 32], 16), (None, 64, [64, 512], 64),
    (None, 4, [4], 4), (None, 4, [], 1), (7, 4, [4, 16], 7),
    (99, 4, [4, 16], 16), (2, 4, [4], 2), (1, 4, [4], 1), (9, 4, [], 1),
])
def test_how_many_rows_a_step_has(asked, tile, counts, want):
  assert speculation.most_rows(asked, tile, counts) == want


def test_rows_below_one_are_refused(model):
  before = model.prefill(IDS[:9])
  for bad in (0, -1):
    with pytest.raises(errors.UsageError, match='speculate: .* found'):
      before.generate(2, speculate=bad)
  assert before.tokens == IDS[:9]


def test_the_default_never_starts_the_self_test():
  model = model_helpers.variant(copy.copy(model_helpers.exact()))
  model._report = None
  assert model.speculative_rows() == model.speculative_rows(1) == 1
  assert model._report is None
  assert model.speculative_rows(16) == 16 and model._report is not None
  assert model.speculative_rows() == speculation.DEFAULT_ROWS


# One step of right and wrong guesses, at every kind of boundary.


def plain_rows(model, start, count):
  """Returns tokens and logits hashes of greedy decoding one by one."""
  context, hashes = model.prefill(IDS[:start]), []
  for _ in range(count):
    logits = context.logits()
    hashes.append(hashing.logits_sha256(logits))
    context.append(int(logits.argmax()))
  return context.tokens[start:], hashes


def check_step(model, start, right):
  """Checks a step of seven guesses of which the first `right` are right."""
  want, hashes = plain_rows(model, start, 8)
  wrong = [(t + 1) % 320 for t in want]
  guess = want[1:right + 1] + wrong[right + 1:]
  assert len(guess) == 7
  context, found = model.prefill(IDS[:start]), []
  context.append(want[0])
  for logits in context.ahead(guess):
    found.append(hashing.logits_sha256(logits))
    context.append(int(logits.argmax()))
  assert found == hashes[1:right + 2]
  assert context.tokens == IDS[:start] + want[:right + 2]
  assert context._done == context.length - 1
  assert context.tokens_computed == context._done
  # Whatever the dropped rows wrote, what follows is as if it were not there.
  context.extend(IDS[:30])
  other = model.prefill(IDS[:start]).extend(want[:right + 2])
  other.extend(IDS[:30])
  assert state(context) == state(other)
  assert all(
      a.tobytes() == b.tobytes() for a, b in zip(
          context.sliding_rows(0, context.length),
          other.sliding_rows(0, other.length)))


# Of pages, window, chunk, ring and capacity.
STARTS = (1, 15, 16, 17, 23, 24, 25, 31, 32, 33, RING - 1, RING, RING + 1, 111,
          127, 128, 129, 2 * RING + 50, 223, 224, 225)
RIGHT = (0, 4, 1, 6, 2)


@pytest.mark.parametrize('start,right', [
    (start, RIGHT[(i + more) % 5])
    for i, start in enumerate(STARTS) for more in (0, 1)])
def test_one_step_of_a_guess_that_is_right_so_far(model, start, right):
  check_step(model, start, right)


def test_the_last_hidden_row_is_that_of_the_last_right_one(model):
  want, hashes = plain_rows(model, 50, 6)
  context = model.prefill(IDS[:50])
  context.append(want[0])
  rows = context.ahead(want[1:] + [5, 5])
  for token in want[1:4]:
    next(rows)
    context.append(token)
  next(rows)  # Right as well; nothing is appended behind it.
  assert context._done == context.length == 54
  assert context.logits_sha256() == hashes[4]
  assert context.tokens_computed == 54


def test_another_token_than_the_guessed_one_ends_a_step(model):
  context = model.prefill(IDS[:50])
  context.append(5)
  rows = context.ahead([6, 7, 8])
  next(rows)
  context.append(9)
  assert list(rows) == []
  assert context.logits_sha256() == model.prefill(
      IDS[:50] + [5, 9]).logits_sha256()


def test_no_token_ends_a_step(model):
  context = model.prefill(IDS[:50])
  context.append(5)
  assert len(list(context.ahead([6, 7, 8]))) == 1
  assert state(context) == state(model.prefill(IDS[:50]).extend([5]))


@pytest.mark.parametrize('pending', [0, 2, 5])
def test_without_one_pending_token_nothing_is_guessed(model, pending):
  context = model.prefill(IDS[:50])
  for token in IDS[50:50 + pending]:
    context.append(token)
  row, = context.ahead([6, 7, 8])
  want = model.prefill(IDS[:50 + pending])
  assert row.tobytes() == want.logits().tobytes()
  assert context.tokens_computed == 50 + pending


def test_a_guess_is_checked(model):
  context = model.prefill(IDS[:50])
  before = state(context)
  context.append(5)
  with pytest.raises(errors.UsageError, match='tokens'):
    next(context.ahead([320]))
  context.tokens.pop()
  assert state(context) == before
  with pytest.raises(errors.UsageError, match='at least one token'):
    next(model.context().ahead([5]))


# Whole generations, on and off.


def both(model, chosen, prompt, count=40, rows=16, **options):
  """Generates with and without; returns generations after comparing all."""
  slow, fast = model.prefill(prompt), model.prefill(prompt)
  options = {'stop_ids': ()} | options
  seen = []

  def push(index, token):
    seen.append((index, token))

  chosen.clear()
  a, = slow.generate(count, speculate=1, on_token=push, **options)
  want, told = list(chosen), list(seen)
  chosen.clear()
  seen.clear()
  b, = fast.generate(count, speculate=rows, on_token=push, **options)
  assert a == b and seen == told
  assert chosen == want and len(want) in (len(a.token_ids),
                                          len(a.token_ids) + 1)
  assert fast._done == slow._done
  assert state(fast) == state(slow)
  assert a.steps == len(want) >= b.steps
  return a, b


@pytest.mark.parametrize('rows', [2, 4, 5, 8, 16, 32])
def test_repeating_text_takes_fewer_steps(model, chosen, rows):
  a, b = both(model, chosen, IDS[:70], 70, rows)
  assert b.steps <= {2: 45, 4: 36, 5: 34, 8: 30}.get(rows, 26)
  assert a.steps == 70


@pytest.mark.parametrize('start,seed', [
    (1, 1), (2, 2), (23, 3), (40, 1), (100, 2), (200, 3)])
def test_text_that_repeats_now_and_then(model, chosen, start, seed):
  a, b = both(model, chosen, IDS[:start], 60, **MIXED | {'seed': seed})
  assert 15 < b.steps < 60 and len(set(a.token_ids)) > 4


def test_text_that_never_repeats(model, chosen):
  options = {'temperature': 50.0, 'seed': 1}
  a, b = both(model, chosen, model_helpers.tokens(40, seed=2), 30, **options)
  assert len(set(a.token_ids)) > 20 and b.steps >= 28


def test_float32(chosen):
  model = model_helpers.exact('float32')
  _, b = both(model, chosen, IDS[:70], 60)
  assert b.steps < 30
  _, b = both(model, chosen, IDS[:70], 60, **MIXED)
  assert b.steps < 60


@pytest.mark.parametrize('name', [
    'tiny-gemma4-e2b', pytest.param('tiny-gemma4-e4b', marks=pytest.mark.slow),
    pytest.param('tiny-gemma4-26b-a4b', marks=pytest.mark.slow),
    pytest.param('tiny-gemma4-31b', marks=pytest.mark.slow)])
def test_gemma4(chosen, name):
  model = model_helpers.tiny_of(f'{name}:0')
  assert bool(model.config.shared_layers) == ('-e' in name)
  for right in (0, 2, 6):
    check_step(model, 60, right)
  programs = {tuple(n.split('.')[:2]) for n in model.programs.hlo_sha256}
  assert ('step', '8') in programs
  assert not model.config.shared_layers or ('sharers', '8') in programs
  both(model, chosen, [2, *IDS[:60]], 30, 8, **MIXED)


def test_the_default_speculates(model, chosen):
  model.self_test()
  _, b = both(model, chosen, IDS[:70], 60, None)
  assert b.steps < 30


# Ends.


def test_a_stop_token_inside_a_right_guess(model, chosen):
  whole, = model.prefill(IDS[:70]).generate(
      60, speculate=1, stop_ids=(), **MIXED)
  found = 0
  for stop in sorted(set(whole.token_ids))[:8]:
    at = whole.token_ids.index(stop)
    a, _ = both(model, chosen, IDS[:70], 60, stop_ids=[stop], **MIXED)
    assert a.finish_reason == 'stop' and a.token_ids == whole.token_ids[:at]
    found += 1
  assert found > 4
  # One that the guess holds, seen by way of a prompt with the answer in it.
  prompt = IDS[:70] + whole.token_ids[:2]
  rest, = model.prefill(prompt).generate(20, speculate=1, stop_ids=())
  prompt = prompt + rest.token_ids + IDS[:20] + prompt[-2:]
  a, b = both(model, chosen, prompt, 40, stop_ids=[rest.token_ids[-1]])
  assert a.token_ids == b.token_ids


@pytest.mark.parametrize('length', [1, 2, 3, 5, 8, 13, 17, 24])
def test_stop_when_ends_behind_that_token(model, chosen, length):
  def stop_when(tokens):
    return len(tokens) == length

  a, b = both(model, chosen, IDS[:70], 40, stop_when=stop_when)
  assert b.finish_reason == 'stop' and len(b.token_ids) == length
  whole, = model.prefill(IDS[:70]).generate(40, stop_ids=(), speculate=1)
  assert a.token_ids == whole.token_ids[:length]


def test_stop_when_wins_over_length_and_holds_in_batches(model):
  def stop_when(tokens):
    return len(tokens) == 3

  options = {'stop_when': stop_when, 'stop_ids': (), 'temperature': 1.0}
  found = model.prefill(IDS[:50]).generate(3, num_samples=5, **options)
  assert [g.finish_reason for g in found] == ['stop'] * 5
  assert [len(g.token_ids) for g in found] == [3] * 5
  found = model.prefill(IDS[:50]).generate(9, num_samples=2, **options)
  assert [len(g.token_ids) for g in found] == [3, 3]
  sizes = []
  model.prefill(IDS[:50]).generate(
      4, stop_ids=(), stop_when=lambda t: sizes.append(len(t)))
  assert sizes == [1, 2, 3, 4]


@pytest.mark.parametrize('count', [1, 2, 3, 6, 17, 33])
def test_the_last_token_wanted_inside_a_right_guess(model, chosen, count):
  a, b = both(model, chosen, IDS[:70], count)
  assert len(b.token_ids) == count and b.finish_reason == 'length'
  assert a.steps == count


@pytest.mark.parametrize('room', [1, 2, 3, 4, 5, 6, 9, 13, 20])
def test_the_end_of_the_capacity(model, chosen, room):
  model = copy.copy(model)
  model.capacity = 100 + room
  a, b = both(model, chosen, IDS[:100], 40)
  assert a.finish_reason == b.finish_reason == 'capacity'
  assert len(b.token_ids) == room
  assert room < 12 or b.steps < room


@pytest.mark.slow  # 10 s.
def test_the_end_of_the_model_context(chosen):
  model = model_helpers.exact()
  most = model.config.max_context
  prompt = (IDS * 20)[:most - 9]
  a, b = both(model, chosen, prompt, 40)
  assert len(b.token_ids) == 9 and b.finish_reason == 'capacity'
  assert a == b


def test_generation_goes_on_where_it_was_left(model, chosen):
  context = model.prefill(IDS[:70])
  for count in (1, 2, 7, 30, 3):
    context.generate(count, stop_ids=(), speculate=16)
  other = model.prefill(IDS[:70])
  other.generate(43, stop_ids=(), speculate=1)
  assert state(context) == state(other)


def test_an_error_in_the_middle_of_a_right_guess_loses_nothing(model):
  whole, = model.prefill(IDS[:70]).generate(60, stop_ids=(), speculate=1)
  for at in range(20, 40, 3):
    context, left = model.prefill(IDS[:70]), [0] * (at - 1)

    def push(unused_index, unused_token, left=left):
      if not left:
        raise KeyboardInterrupt
      left.pop()

    with pytest.raises(KeyboardInterrupt):
      context.generate(60, stop_ids=(), speculate=16, on_token=push)
    assert context.tokens == IDS[:70] + whole.token_ids[:at - 1]
    rest, = context.generate(61 - at, stop_ids=(), speculate=16)
    assert rest.token_ids == whole.token_ids[at - 1:]


def test_samples_in_a_batch_are_those_drawn_alone(model):
  options = {'stop_ids': (), 'speculate': 16} | MIXED
  batch = model.prefill(IDS[:70]).generate(30, num_samples=3, **options)
  alone, = model.prefill(IDS[:70]).generate(30, **options)
  assert batch[0] == alone
  assert alone.steps < 30 and {g.steps for g in batch} == {30}


# Where the self-test refuted what it rests on.


def test_a_refuted_row_count_is_never_run(model, chosen):
  other = refuting(
      model_helpers.variant(model), 'rows_16', 'rows_8', 'rows_32')
  tile = model.profile.tile
  assert other.speculative_rows(32) == other.speculative_rows() == tile
  _, b = both(other, chosen, IDS[:70], 60, 32)
  assert 60 / tile <= b.steps < 60
  assert {n.split('.')[1] for n in other.programs.hlo_sha256
          if n.startswith('step')} <= {str(tile), '32'}  # 32 by the prefill.
  other = refuting(model, 'rows_16')
  assert other.row_counts() == [n for n in model.row_counts() if n != 16]
  both(other, chosen, IDS[:70], 60, 12)


@pytest.mark.parametrize('name', ['tile', 'slot', 'neighbours', 'run'])
def test_without_a_promise_there_is_no_speculation(model, chosen, name):
  other = refuting(model, name)
  assert other.speculative_rows(16) == 1
  a, b = both(other, chosen, IDS[:70], 20)
  assert a.steps == b.steps == 20
  context = other.prefill(IDS[:50])
  context.append(5)
  assert len(list(context.ahead([6, 7]))) == 1


# Deposits and grafts.


def deposited(context, path, **options):
  store = store_lib.Store(str(path), create=True)
  return store, kv.deposit(context.model, store, context, **options)


@pytest.mark.parametrize('start,sliding', [(40, 'full'), (90, 'window')])
def test_stored_blocks_are_equal(model, tmp_path, start, sliding):
  for n, options in enumerate(({}, MIXED)):
    made = []
    for rows in (1, 16):
      context = model.prefill(IDS[:start])
      found, = context.generate(
          COUNT, stop_ids=(), speculate=rows, **options)
      _, artifact = deposited(
          context, tmp_path / f'{n}-{rows}', sliding=sliding, block=32)
      made.append((found, stored(artifact)))
      assert rows == 1 or found.steps < COUNT
    assert made[0] == made[1]
    fresh = store_lib.Store(str(tmp_path / f'{n}-fresh'), create=True)
    again = kv.deposit(
        model, fresh, IDS[:start] + made[0][0].token_ids, sliding=sliding,
        block=32)
    assert stored(again) == made[0][1]


@pytest.mark.parametrize('record', [True, False])
def test_speculated_deposited_grafted_and_speculated_again(
    model, tmp_path, record):
  seen = []
  for rows in (1, 16):
    store = store_lib.Store(str(tmp_path / str(rows)), create=True)
    kv.deposit(model, store, IDS[:90], name='0', block=32)
    for n, options in enumerate(({}, MIXED, {}, MIXED)):
      context = kv.graft(model, store, str(n), record=True)
      other = kv.graft(model, store, str(n), record=record)
      found, = context.generate(50, stop_ids=(), speculate=rows, **options)
      again, = other.generate(50, stop_ids=(), speculate=rows, **options)
      assert found == again
      assert rows == 1 or found.steps < 50
      assert context.tokens_restored == 89 + 50 * n
      assert context.tokens_computed == 50
      made = kv.deposit(
          model, store, context, name=str(n + 1), block=32)
      seen.append((rows, n, found, state(context), stored(made)))
  half = len(seen) // 2
  assert [s[1:] for s in seen[:half]] == [s[1:] for s in seen[half:]]


def test_the_end_of_a_speculated_context_is_zero_behind_a_graft(
    model, tmp_path):
  context = model.prefill(IDS[:90])
  context.generate(41, stop_ids=(), speculate=16)
  store, made = deposited(context, tmp_path)
  cache = kv.graft(model, store, made).cache
  for side in (cache.k, cache.v):
    assert not side[config_lib.GLOBAL][:, :, 131:].any()


def test_a_fork_speculates_alike(model):
  context = model.prefill(IDS[:70])
  context.generate(20, stop_ids=(), speculate=16)
  other = context.fork()
  a, = context.generate(30, stop_ids=(), speculate=16)
  b, = other.generate(30, stop_ids=(), speculate=1)
  assert a == b and state(context) == state(other)
