import copy
import dataclasses
import pathlib
import shutil

import numpy as np
import pytest

import kvgraft_jax as kv
from kvgraft_jax import config as config_lib
from kvgraft_jax import errors
from kvgraft_jax import store as store_lib
import model_helpers
import store_helpers

_IDS = model_helpers.tokens(150)
_TAIL = model_helpers.tokens(70, seed=9)


@pytest.fixture(scope='module')
def model():
  return model_helpers.exact()


@pytest.fixture(scope='module')
def store(tmp_path_factory):
  return store_lib.Store(str(tmp_path_factory.mktemp('store')))


@pytest.fixture(scope='module')
def whole(model, store):
  """Deposits the prompt; the artifact that most tests graft from."""
  return kv.deposit(model, store, _IDS, name='whole')


@pytest.fixture(scope='module')
def fresh(model):
  """Returns hashes of a prefix and five tokens more, computed from nothing."""
  return lambda tokens: _hashes(model.prefill(tokens + _TAIL[:5]))


def _hashes(context):
  return context.logits_sha256(), model_helpers.cache_sha256(context)


def _check(fresh, context, tokens):
  """Compares a continued graft with fresh; only the tail was run."""
  context.extend(_TAIL[:5])
  assert (context.tokens_restored, context.tokens_computed) == (
      len(tokens), 5)
  assert _hashes(context) == fresh(tokens)


# Other models and other numerics.


def test_other_weights_of_the_same_shape_are_refused(model, store, whole):
  other = model_helpers.tiny(seed=1)
  other.self_test()
  before = model.prefill(_IDS[:30]).logits_sha256()
  with pytest.raises(errors.IncompatibleError, match='model differs') as info:
    kv.graft(other, store, whole)
  assert info.value.factor == 'model' and info.value.exit_code == 2
  for policy in ('recompute', 'inexact'):
    with pytest.raises(errors.IncompatibleError, match='model differs'):
      kv.graft(other, store, whole, on_mismatch=policy)
  with pytest.raises(errors.IncompatibleError, match='model differs'):
    kv.deposit(other, store, _TAIL[:5], parent=whole)
  assert model.prefill(_IDS[:30]).logits_sha256() == before


@pytest.mark.parametrize('factor', ['tokenizer', 'template'])
def test_another_tokenizer_or_template_is_refused(
    model, store, whole, factor):
  other = _twin(model)
  setattr(other, f'{factor}_fingerprint', '0' * 64)
  with pytest.raises(errors.IncompatibleError, match=factor) as info:
    kv.graft(other, store, whole)
  assert info.value.factor == factor


def _float32(model):
  # With the other dtype's self-test: it costs half a minute, and here it only
  # says which factors are compared.
  other = copy.copy(model_helpers.tiny('float32'))
  other._report = model.self_test()
  return other


def _twin(model, **environment):
  """Returns the model on what calls itself another machine."""
  other = copy.copy(model)
  changed = dict(model.profile.environment) | environment
  other.profile = dataclasses.replace(
      model.profile, environment=tuple(sorted(changed.items())))
  return other


@pytest.mark.parametrize('factor,make', [
    ('dtype', _float32),
    ('jaxlib', lambda m: _twin(m, jaxlib='9.9.9')),
    ('threads', lambda m: _twin(m, threads='64')),
    ('cpu_features', lambda m: _twin(m, cpu_features='sse4_2 avx512_bf16')),
    ('driver', lambda m: _twin(m, driver='550')),
])
def test_another_class_is_refused_and_the_factor_named(
    model, store, whole, factor, make):
  with pytest.raises(errors.ClassMismatchError, match=factor) as info:
    kv.graft(make(model), store, whole)
  assert info.value.factor == factor and info.value.exit_code == 2


def test_another_page_is_another_class(model, store, whole):
  other = _twin(model)
  other.profile = dataclasses.replace(model.profile, page=32)
  with pytest.raises(errors.ClassMismatchError, match='page, expected 16') as e:
    kv.graft(other, store, whole)
  assert e.value.factor == 'page'


def test_recompute_gives_the_bits_of_this_machine(model, store, whole):
  other = _float32(model)
  context = kv.graft(
      other, store, whole, 90, on_mismatch='recompute')
  assert context.exact and context.parent is None
  assert (context.tokens_restored, context.tokens_computed) == (0, 90)
  assert _hashes(context) == _hashes(other.prefill(_IDS[:90]))


def test_inexact_goes_on_and_says_so(model, store, whole):
  other = _twin(model, threads='64')
  context = kv.graft(other, store, whole, 90, on_mismatch='inexact')
  assert not context.exact and context.tokens_restored == 90
  assert not context.fork().exact
  context.extend(_TAIL[:5])
  assert context.tokens_computed == 5
  with pytest.raises(errors.UsageError, match='inexactly'):
    kv.deposit(other, store, context)


def test_inexact_of_another_dtype_is_still_refused(model, store, whole):
  other = _float32(model)
  with pytest.raises(errors.IncompatibleError, match='layout') as info:
    kv.graft(other, store, whole, on_mismatch='inexact')
  assert info.value.factor == 'layout'


def test_where_the_self_test_fails_nothing_is_promised(model, tmp_path):
  store = store_lib.Store(str(tmp_path))
  other = _twin(model)
  report = model.self_test()
  other._report = dataclasses.replace(
      report, invariances=report.invariances | {'slot': False})
  made = kv.deposit(other, store, _IDS[:40])
  with pytest.raises(errors.ClassMismatchError, match='refuted slot'):
    kv.graft(other, store, made)
  context = kv.graft(other, store, made, on_mismatch='inexact')
  assert not context.exact


# Damage: refused, and the process goes on as before.


@pytest.fixture
def damaged(model, tmp_path):
  """A store with two artifacts, and what the process computed before."""
  store = store_lib.Store(str(tmp_path))
  made = kv.deposit(model, store, _IDS, name='one')
  other = kv.deposit(
      model, store, model_helpers.tokens(150, seed=2), name='two')
  live = kv.graft(model, store, 'two', 100).extend(_TAIL[:9])
  before = (_hashes(live), _known(model))
  yield store, made, other
  assert (_hashes(live), _known(model)) == before
  # The other artifact still serves.
  context = kv.graft(model, store, other, 100)
  assert _hashes(context.extend(_TAIL[:9])) == before[0]
  assert context.tokens_computed == 9


def _known(model):
  context = model.prefill(_IDS[:30])
  return context.generate(4, stop_ids=())[0], _hashes(context)


def _refused(model, store, made, error=errors.DamageError):
  with pytest.raises(error) as info:
    kv.graft(model, store, made.id)
  assert '\n' not in str(info.value)
  assert info.value.exit_code == 1
  return str(info.value)


def _data(store, made):
  files = store_helpers.files(store.url, made.manifest)
  blocks = [n for n in files if n != 'tokens']
  assert {n.split('/')[0] for n in blocks} == set(config_lib.KINDS)
  return files


@pytest.mark.parametrize('kind', ['tokens', 'sliding', 'global'])
@pytest.mark.parametrize('how', ['flip', 'truncate', 'empty', 'lose'])
def test_damaged_files_are_refused(model, damaged, kind, how):
  store, made, _ = damaged
  # The last block: a graft of the whole needs it in both kinds.
  path = [p for n, p in _data(store, made).items() if n.startswith(kind)][-1]
  data = bytearray(path.read_bytes())
  if how == 'lose':
    path.unlink()
  else:
    data[9] ^= 1  # Of the first position.
    size = {'flip': len(data), 'truncate': len(data) - 1, 'empty': 0}[how]
    path.write_bytes(data[:size])
  message = _refused(model, store, made)
  assert kind in message and made.id[:12] in message


@pytest.mark.parametrize('kind', ['tokens', *config_lib.KINDS])
def test_a_flip_anywhere_is_refused_or_means_nothing(
    model, damaged, fresh, kind):
  store, made, _ = damaged
  path = [p for n, p in _data(store, made).items() if n.startswith(kind)][-1]
  data, refused = path.read_bytes(), 0
  for at in np.linspace(0, len(data) - 1, 20).astype(int):
    path.write_bytes(data[:at] + bytes([data[at] ^ 64]) + data[at + 1:])
    try:
      context = kv.graft(model, store, made)
    except errors.DamageError:
      refused += 1
      continue
    _check(fresh, context, _IDS)  # Padding behind the last position.
  assert refused >= 10
  path.write_bytes(data)
  _check(fresh, kv.graft(model, store, made), _IDS)


def test_a_flipped_manifest_is_refused(model, damaged):
  store, made, _ = damaged
  path = pathlib.Path(store.url, 'a', made.key, 'manifest.json')
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)
  with pytest.raises(errors.KvgraftError) as info:
    kv.graft(model, store, made.key)
  assert '\n' not in str(info.value)


@pytest.mark.parametrize('kind', config_lib.KINDS)
def test_swapped_blocks_are_refused(model, damaged, kind):
  store, made, _ = damaged
  paths = [p for n, p in _data(store, made).items() if n.startswith(kind)]
  a, b = paths[2], paths[3]
  assert a.stat().st_size == b.stat().st_size
  first, second = a.read_bytes(), b.read_bytes()
  a.write_bytes(second)
  b.write_bytes(first)
  assert kind in _refused(model, store, made)


@pytest.mark.parametrize('kind', ['tokens', 'sliding', 'global'])
def test_another_artifacts_file_is_refused(model, damaged, kind):
  store, made, other = damaged
  mine, theirs = _data(store, made), _data(store, other)
  name = [n for n in mine if n.startswith(kind)][-1]
  assert mine[name].stat().st_size == theirs[name].stat().st_size
  shutil.copyfile(theirs[name], mine[name])
  assert kind in _refused(model, store, made)


def test_a_block_that_is_not_needed_may_be_damaged(model, damaged, fresh):
  store, made, _ = damaged
  path = [p for n, p in _data(store, made).items()
          if n.startswith('global')][-1]
  path.unlink()
  _check(fresh, kv.graft(model, store, made, 100), _IDS[:100])
