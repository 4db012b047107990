"""Every architecture against logits of an independent implementation.

`testdata/oracle` holds transformers' float32 logits of tiny random models and
the recipe of their weights (`scripts/make_oracle_goldens.py`).
"""

import jax
import numpy as np
import pytest

from kvgraft_jax import engine
from kvgraft_jax import reference
import oracle_weights

CASES = oracle_weights.names()


@pytest.fixture(scope='module', name='model', params=CASES)
def _model(request, tmp_path_factory):
  golden = oracle_weights.load(request.param)
  folder = oracle_weights.write_case(
      tmp_path_factory.mktemp(request.param), request.param)
  model = engine.load_model(
      str(folder), dtype='float32', chunk=8, tile=8, page=4, self_test=False)
  return golden, model


def test_logits_are_the_oracles(model):
  golden, model = model
  wanted = oracle_weights.logits(golden)
  assert wanted.shape == (2, 13, 128) and np.ptp(wanted) > 1
  # 13 tokens take two chunks, and the window of 4 is passed.
  assert model.config.sliding.window == 4
  for ids, rows in zip(golden['tokens'], wanted):
    got = model.context().logits_of(ids)
    assert np.abs(got - rows).max() < 1e-4


def test_the_plain_forward_agrees(model):
  golden, model = model
  params = jax.tree.map(np.asarray, model.params)
  for ids, rows in zip(golden['tokens'], oracle_weights.logits(golden)):
    got = reference.logits(params, model.config, ids, dtype=np.float64)
    assert np.abs(got - rows).max() < 1e-4


def test_there_is_a_case_of_every_architecture():
  assert CASES == [
      'gemma3-linear', 'gemma3-small', 'gemma4-12b', 'gemma4-26b-a4b',
      'gemma4-31b', 'gemma4-e2b', 'gemma4-e4b']
