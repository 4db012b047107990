"""Contexts beyond the length a model was trained for, and positions near 2**24.

The wall in front of them, the one warning, and that every bit stays the same.
"""

import dataclasses
import logging

import numpy as np
import pytest

from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import rope
from kvgraft_jax import store as store_lib
from kvgraft_jax.checkpoints import resolve
import model_helpers

IDS = model_helpers.tokens(150)
TRAINED = 64
MOST = rope.MAX_POSITION


@pytest.fixture(name='short', scope='module')
def short_fixture():
  """Returns tiny:0 as if trained for 64 positions; takes Model's arguments."""
  found = resolve.resolve('tiny:0', 'bfloat16')
  checkpoint = dataclasses.replace(
      found, config=dataclasses.replace(found.config, max_context=TRAINED))
  profile = model_helpers.exact().profile
  return lambda *args: engine.Model(checkpoint, profile, *args)


def test_the_capacity_is_2_to_the_24_then(short):
  assert short().capacity == short(None, False).capacity == TRAINED
  assert short(None, True).capacity == short(MOST, True).capacity == MOST
  assert short(100, True).capacity == 100
  with pytest.raises(errors.CapacityError, match='1 to 16777216, .* exact'):
    short(MOST + 1, True)
  with pytest.raises(errors.CapacityError) as refused:
    short(TRAINED + 1)
  assert "expected 1 to 64, the model's context, found 65" in str(refused.value)
  assert 'allow_beyond_trained' in str(refused.value)
  with pytest.raises(errors.CapacityError) as refused:
    short(0)
  assert 'allow_beyond_trained' not in str(refused.value)


def test_the_wall_names_the_way_past_it(short):
  with pytest.raises(errors.CapacityError) as refused:
    short().prefill(IDS[:65])
  assert '65 tokens' in str(refused.value)
  assert 'allow_beyond_trained' in str(refused.value)
  with pytest.raises(errors.CapacityError, match='raise the capacity') as no:
    short(32).prefill(IDS[:33])
  assert 'allow_beyond_trained' not in str(no.value)
  with pytest.raises(errors.CapacityError, match='raise the capacity'):
    short(100, True).prefill(IDS[:101])
  model = short(None, True)
  assert model.check_tokens([5], MOST - 1) == [5]
  with pytest.raises(errors.CapacityError, match='would not be exact'):
    model.check_tokens([5], MOST)


def test_one_warning_a_model_and_the_same_bits(short, tmp_path, caplog):
  model, trained = short(None, True), model_helpers.exact()
  assert trained.config.max_context > len(IDS)
  caplog.set_level(logging.WARNING, 'kvgraft_jax')
  context = model.prefill(IDS[:TRAINED])
  assert not caplog.records
  context.extend(IDS[TRAINED:100]).extend(IDS[100:])
  assert [r.name for r in caplog.records] == ['kvgraft_jax.engine']
  text = caplog.records[0].getMessage()
  assert '100 positions' in text and '64 that tiny was trained' in text

  fresh = trained.prefill(IDS)
  assert context.logits_sha256() == fresh.logits_sha256()
  store = store_lib.Store(str(tmp_path), create=True)
  made = depositing.deposit(model, store, IDS)
  assert made.id == depositing.deposit(
      trained, store_lib.Store(str(tmp_path / 'b'), create=True), IDS).id
  assert len(caplog.records) == 1
  again = short(None, True)
  grafted = grafting.graft(again, store, made.id)
  assert grafted.logits_sha256() == fresh.logits_sha256()
  assert len(caplog.records) == 2
  with pytest.raises(errors.CapacityError, match='allow_beyond_trained'):
    grafting.graft(short(), store, made.id)


class _Far:
  """Sliding layers alone, on slots that begin far behind position 0.

  A cache without global layers takes no memory, whatever its length.
  """

  def __init__(self, dtype: str, rows: int):
    model = model_helpers.tiny(dtype)
    self.config = dataclasses.replace(
        model.config, layers=(config_lib.SLIDING,) * 3)
    self.rows, self.profile = rows, model.profile
    # A global layer's parameters have a sliding one's shapes.
    self.params = model.params
    self.programs = programs_lib.Programs(
        self.config, self.profile, self.params)

  def hidden(self, first: int, count: int) -> np.ndarray:
    """Returns hidden rows of IDS at positions [first, first + count)."""
    # The ring begins with zeros: nothing in front of `first` may be seen.
    self.programs._scalars['first_position'] = np.int32(first)
    cache = cache_lib.empty(
        self.config, self.profile, batch=1, capacity=MOST + 64,
        scalars=self.programs.fresh_scalars())
    parts = []
    for at in range(0, count, self.rows):
      step = np.zeros((1, self.rows), np.int32)
      ids = IDS[at:min(at + self.rows, count)]
      step[0, :len(ids)] = ids
      hidden, cache = self.programs.run_step(
          self.params, cache, step, np.asarray([first + at], np.int32))
      parts.append(np.asarray(hidden)[0, :len(ids)])
    return np.concatenate(parts)


@pytest.mark.parametrize('count', [100, 101])
def test_the_last_exact_positions(count):
  # The window is 24 and the ring 64: both are left behind; the last step is
  # padded past 2**24, where there are no rotary rows.
  first = MOST - count
  chunks, tiles = (_Far('bfloat16', n).hidden(first, count) for n in (32, 4))
  assert chunks.tobytes() == tiles.tobytes()
  assert np.unique(chunks, axis=0).shape[0] == count


def test_far_positions_mean_what_near_ones_do():
  # Attention depends on distances; float32 keeps what rounding leaves.
  model = _Far('float32', 32)
  near = model.hidden(0, 100)
  for first in (1_000_000, 4_000_000, MOST - 100):
    far = model.hidden(first, 100)
    assert np.abs(far - near).max() < 1e-4 * np.abs(near).max()
    assert (far != near).any()
