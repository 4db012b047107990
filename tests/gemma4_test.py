"""Gemma 4, each published size made tiny: same bits however it is run.

What the logits should be is `oracle_test`'s concern; here every schedule, and
a graft, must give the bits of a plain prefill.
"""

import functools

import pytest

import kvgraft_jax
from kvgraft_jax import cache as cache_lib
from kvgraft_jax import config as config_lib
from kvgraft_jax import engine
from kvgraft_jax import grafting
from kvgraft_jax import hashing
from kvgraft_jax import plan
import model_helpers

SLOW = ('tiny-gemma4-12b', 'tiny-gemma4-e4b')  # Close to the others.
SIZES = [
    pytest.param(n, marks=pytest.mark.slow if n in SLOW else ())
    for n in config_lib.TINY_PRESETS if n != 'tiny']
IDS = [2, *model_helpers.tokens(150)]


@functools.cache
def load(name, dtype='bfloat16', **profile):
  return engine.load_model(f'{name}:0', dtype=dtype, self_test=False, **profile)


def digest(model, ids):
  return model.prefill(ids).logits_sha256()


@pytest.mark.parametrize('name', SIZES)
def test_the_self_test_proves_every_invariance(name):
  report = load(name).self_test()
  assert report.exact
  refuted = [n for n, v in report.invariances.items() if v is False]
  assert not refuted and {'chunk', 'tile', 'batch', 'capacity', 'slot'} <= {
      n for n, v in report.invariances.items() if v}


@pytest.mark.slow
@pytest.mark.parametrize('name', SIZES)
def test_the_self_test_in_float32(name):
  report = load(name, 'float32', tile=32).self_test()
  assert report.exact


@pytest.mark.parametrize('name', [
    pytest.param(
        p.values[0],
        # A minute each; the one with experts stands for all.
        marks=() if p.values[0] == 'tiny-gemma4-26b-a4b' else pytest.mark.slow)
    for p in SIZES])
def test_the_whole_model_has_the_same_bits_on_every_schedule(name):
  model = load(name)
  want = digest(model, IDS)
  for chunk in (4, 16):  # All by tiles, and other chunks.
    assert digest(load(name, chunk=chunk, tile=4), IDS) == want, chunk
  assert model.prefill(IDS[:77]).extend(IDS[77:]).logits_sha256() == want
  # Every row's hidden state, where a prefill wants the last one alone.
  rows = model.context().logits_of(IDS)
  assert hashing.logits_sha256(rows[-1]) == want
  assert hashing.logits_sha256(rows[76]) == digest(model, IDS[:77])
  # A batch of samples, each as if it were alone.
  made = model.prefill(IDS[:60]).generate(
      4, num_samples=3, temperature=1.0, seed=5, stop_ids=())
  for i, one in enumerate(made):
    context = model.prefill(IDS[:60])
    assert one.logits_sha256 == context.logits_sha256()
    context.extend(one.token_ids)
    assert len(one.token_ids) == 4 and i < 3
  assert len({tuple(m.token_ids) for m in made}) > 1


@pytest.mark.parametrize('name', SIZES)
@pytest.mark.parametrize('sliding', ['full', 'window'])
def test_deposit_graft_verify(name, sliding, tmp_path):
  model = load(name)
  store = kvgraft_jax.Store(str(tmp_path), create=True)
  made = kvgraft_jax.deposit(model, store, IDS, sliding=sliding)
  assert made.tokens_computed == len(IDS)
  assert made.manifest.nbytes == plan.artifact_bytes(
      model.config, model.profile, len(IDS), sliding)
  report = kvgraft_jax.verify(model, store, made.id)
  assert report.sha256_equal == report.continuations == 50
  assert report.argmax_agree == 50 and report.max_kl == 0
  assert report.greedy_tokens_equal == 64 and report.restored_only
  checked = kvgraft_jax.audit(model, store, made.id)
  assert checked.blocks_equal == checked.blocks_checked > 0
  context = kvgraft_jax.graft(model, store, made.id)
  fresh = model.prefill(IDS)
  tail = model_helpers.tokens(37, seed=3)
  assert context.extend(tail).logits_sha256() == (
      fresh.extend(tail).logits_sha256())
  assert context.tokens_restored == len(IDS)
  assert context.tokens_computed == len(tail)
  assert model_helpers.cache_sha256(context) == (
      model_helpers.cache_sha256(fresh))


def test_shared_layers_own_nothing():
  model = load('tiny-gemma4-e2b')
  config = model.config
  assert config.shared_layers == 5 and config.first_shared == 5
  owned = {k: config.kind_layers(k) for k in config_lib.KINDS}
  assert owned == {'sliding': (0, 1, 3), 'global': (2, 4)}
  assert [config.cache_row(i) for i in range(5, 10)] == [2, 2, 1, 2, 1]
  shapes = cache_lib.shapes(config, model.profile, 1, 64)
  assert {k: s[0] for k, s in shapes.items()} == {'sliding': 3, 'global': 2}
  layouts = grafting.layouts(config, 'bfloat16')
  assert {k: v.layers for k, v in layouts.items()} == owned


def test_a_prefill_runs_shared_layers_for_its_last_rows_only(monkeypatch):
  model = load('tiny-gemma4-e2b')
  digest(model, IDS)  # Compiled.
  ran = []

  def spy(name):
    real = getattr(model.programs, name)

    def call(rows, batch, capacity):
      ran.append((name, rows))
      return real(rows, batch, capacity)
    monkeypatch.setattr(model.programs, name, call)

  spy('step')
  spy('sharers')
  context = model.prefill(IDS)
  rows = [r for n, r in ran if n == 'step']
  assert sum(rows) >= len(IDS) and max(rows) == model.profile.chunk
  assert [r for n, r in ran if n == 'sharers'] == [model.profile.tile]
  assert context.tokens_computed == len(IDS)
