"""Streamed contexts: the same bits as in memory, in constant device memory."""

import dataclasses
import gc

import jax
import numpy as np
import pytest

from kvgraft_jax import depositing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import programs as programs_lib
from kvgraft_jax import store as store_lib
from kvgraft_jax import streaming as streaming_lib
from kvgraft_jax import verification
import model_helpers

PAGE, CHUNK = 16, 32


def tokens(count: int, seed: int = 0) -> list[int]:
  rng = np.random.Generator(np.random.PCG64(seed))
  return rng.integers(5, 250, size=count).tolist()


def least(model, extra: int = 0, host: int | None = None):
  """Returns the smallest budget of device memory, and so much more."""
  return streaming_lib.Streaming(
      streaming_lib.least_bytes(model.config, model.profile) + extra, host)


def same_state(a: engine.Context, b: engine.Context) -> bool:
  """Tells whether all K and V that a continuation sees, and logits, agree."""
  assert a.length == b.length
  window = a.model.config.sliding.window or a.length
  pairs = [*zip(a.global_rows(0, a.length), b.global_rows(0, b.length))]
  first = max(0, a.length - window)
  pairs += zip(a.sliding_rows(first, a.length),
               b.sliding_rows(first, b.length))
  return all(x.tobytes() == y.tobytes() for x, y in pairs) and (
      a.logits().tobytes() == b.logits().tobytes())


@pytest.mark.parametrize('dtype', model_helpers.DTYPES)
# Around a page, a chunk, what stays hot (48) and a group; far beyond it.
@pytest.mark.parametrize(
    'count', [1, 15, 16, 17, 31, 32, 33, 47, 48, 49, 64, 65, 80, 96, 143, 300])
def test_streamed_prefill_has_the_bits_of_one_in_memory(dtype, count):
  model = model_helpers.exact(dtype)
  ours = model.prefill(tokens(count), streaming=least(model))
  theirs = model.prefill(tokens(count))
  assert ours.streamed is not None and ours.streamed.layout.hot == PAGE + CHUNK
  if count > PAGE + CHUNK:
    assert ours.streamed.base > 0  # Something really was cold.
  assert ours.tokens_computed == count
  assert same_state(ours, theirs)


@pytest.mark.parametrize('spec', [
    'tiny-gemma4-12b:0', 'tiny-gemma4-e2b:0', 'tiny-gemma4-26b-a4b:0'])
def test_families_with_shared_layers_and_experts(spec):
  model = model_helpers.tiny_of(spec)
  ours = model.prefill(tokens(150), streaming=least(model, 20_000))
  theirs = model.prefill(tokens(150))
  assert ours.streamed.base >= 64
  assert same_state(ours, theirs)
  assert ours.generate(6, stop_ids=(), speculate=1) == theirs.generate(
      6, stop_ids=(), speculate=1)


@pytest.mark.parametrize('extra', [0, 1, 5_000, 20_000, 100_000, 1_000_000])
def test_layout_stays_inside_its_budget(extra):
  model = model_helpers.tiny()
  streaming = least(model, extra)
  ours = model.prefill(tokens(200), streaming=streaming)
  assert ours.nbytes == ours.streamed.layout.device_bytes
  assert ours.nbytes <= streaming.device_kv_bytes
  assert same_state(ours, model.prefill(tokens(200)))


def test_device_memory_does_not_grow():
  model = model_helpers.tiny()
  found = set()
  context = engine.Context(model, streaming=least(model))
  for _ in range(8):
    context.extend(tokens(40))
    found.add(context.usage().device_kv_bytes)
  assert len(found) == 1
  assert found == {least(model).device_kv_bytes}
  usage = context.usage()
  assert usage.device_kv_source == 'buffers'
  spec = model.config.spec('global')
  assert usage.host_kv_bytes >= (320 - 48) * 4 * spec.kv_heads * spec.head_dim
  assert (usage.tokens_computed, usage.tokens_restored) == (320, 0)
  assert usage.store_bytes_read == usage.store_blocks_read == 0


def on_the_device(model) -> int:
  """Returns bytes of all arrays that look like keys or values of global layers.

  Whoever holds them: what a context says of itself is not asked.
  """
  spec = model.config.spec('global')
  gc.collect()
  return sum(x.nbytes for x in jax.live_arrays()
             if x.dtype.itemsize == 2 and x.ndim == 5
             and x.shape[-2:] == (spec.kv_heads, spec.head_dim))


def test_samples_and_scores_share_the_device_memory(monkeypatch):
  model = model_helpers.tiny()
  outside = on_the_device(model)
  context = model.prefill(tokens(150), streaming=least(model))
  alone = on_the_device(model) - outside
  assert 0 < alone <= context.usage().device_kv_bytes
  found = []
  made = context.generate(
      3, num_samples=4, stop_ids=(), temperature=1.0,
      on_token=lambda *_: found.append(on_the_device(model) - outside))
  assert len(found) == 12 and max(found) <= alone
  whole = model.prefill(tokens(150))
  assert made == whole.generate(
      3, num_samples=4, stop_ids=(), temperature=1.0)
  assert context.usage().tokens_computed == 150 + 4 * 2

  rows = engine.Context.hidden_of

  def hidden_of(self, ids):
    found.append(on_the_device(model) - outside)
    return rows(self, ids)

  found.clear()
  del whole
  monkeypatch.setattr(engine.Context, 'hidden_of', hidden_of)
  score = context.score(tokens(4, seed=5))
  assert found and max(found) <= alone
  assert context.usage().tokens_computed == 150 + 4 * 2 + 3
  assert context.usage().device_kv_bytes == least(model).device_kv_bytes
  assert score == model.prefill(tokens(150)).score(tokens(4, seed=5))


def test_a_graft_makes_no_second_cache(scene, monkeypatch):
  made = []
  empty = programs_lib.Programs.empty_cache
  monkeypatch.setattr(
      programs_lib.Programs, 'empty_cache',
      lambda self, *args: made.append(args) or empty(self, *args))
  context = grafting.graft(
      scene.model, scene.store, scene.made, streaming=least(scene.model))
  assert context.usage().device_kv_bytes == context.streamed.layout.device_bytes
  assert not made


@pytest.mark.parametrize('budget', [10**9, 10**30])
def test_no_more_is_taken_than_the_capacity_needs(budget):
  model = model_helpers.tiny()
  context = model.prefill(
      tokens(60), streaming=streaming_lib.Streaming(budget, 10**30))
  assert model.capacity <= context.streamed.layout.hot <= (
      model.capacity + PAGE + CHUNK)
  assert same_state(context, model.prefill(tokens(60)))


@pytest.mark.parametrize('args', [
    (48e6,), ('48MB',), (10**6, 1e9), (None, '1GB')])
def test_sizes_that_are_no_numbers(args):
  with pytest.raises(errors.UsageError, match='_kv_bytes: expected a whole'):
    streaming_lib.Streaming(*args)


def test_what_is_no_streaming_is_refused():
  with pytest.raises(errors.UsageError, match='expected a Streaming, found 9'):
    model_helpers.tiny().prefill([5], streaming=9)


def test_too_little_memory_names_the_least():
  model = model_helpers.tiny()
  needed = streaming_lib.least_bytes(model.config, model.profile)
  with pytest.raises(errors.UsageError, match=f'at least {needed} .*found'):
    model.prefill([5], streaming=streaming_lib.Streaming(needed - 1))


def test_host_memory_that_is_full_is_an_error_and_loses_nothing():
  model = model_helpers.tiny()
  context = model.prefill(tokens(40), streaming=least(model, host=20_000))
  with pytest.raises(errors.CapacityError, match='host_kv_bytes.*--stream'):
    context.extend(tokens(60, seed=1))
  done = context.length
  assert 40 <= done < 100
  other = model.prefill((tokens(40) + tokens(60, seed=1))[:done])
  assert same_state(context, other)


@dataclasses.dataclass
class Scene:
  model: engine.Model
  store: store_lib.Store
  made: grafting.Artifact
  ids: list[int]


@pytest.fixture(scope='module')
def scene(tmp_path_factory):
  model = model_helpers.tiny()
  store = store_lib.Store(str(tmp_path_factory.mktemp('streamed')))
  ids = tokens(203)
  return Scene(model, store, depositing.deposit(model, store, ids), ids)


@pytest.mark.parametrize('host', [30_000, 10**9])
@pytest.mark.parametrize('length', [1, 16, 48, 49, 96, 143, 160, 203])
def test_streamed_graft_of_any_length(scene, length, host):
  model = scene.model
  ours = grafting.graft(
      model, scene.store, scene.made, length,
      streaming=least(model, 20_000, host))
  theirs = model.prefill(scene.ids[:length])
  assert (ours.tokens_restored, ours.tokens_computed) == (length, 0)
  for context in (ours, theirs):
    context.extend(tokens(37, seed=2))
  assert ours.tokens_computed == 37
  assert same_state(ours, theirs)
  usage = ours.usage()
  assert usage.store_bytes_read > 0 and usage.store_blocks_read > 0
  assert usage.host_kv_bytes <= max(host, 100_000)


def test_what_came_from_the_store_once_stays_in_host_memory(scene):
  def read(host):
    context = grafting.graft(
        scene.model, scene.store, scene.made,
        streaming=least(scene.model, 0, host))
    context.logits()
    before = context.usage().store_bytes_read
    context.generate(4, stop_ids=(), speculate=1)
    return context.usage().store_bytes_read - before

  assert read(10**9) == 0
  assert read(8_000) > 0


def test_what_forks_read_is_counted(scene):
  context = grafting.graft(
      scene.model, scene.store, scene.made,
      streaming=least(scene.model, 0, 8_000))
  context.logits()
  before = context.usage()
  context.score(tokens(2, seed=3))  # One step, on a fork.
  once = context.usage()
  context.score(tokens(2, seed=3))
  twice = context.usage()
  assert once.store_bytes_read > before.store_bytes_read
  assert twice.store_bytes_read - once.store_bytes_read == (
      once.store_bytes_read - before.store_bytes_read)
  assert twice.store_blocks_read > once.store_blocks_read


@pytest.mark.parametrize('parent', [137, 150, 160])
def test_a_deposit_behind_others_reads_them_once(scene, tmp_path, parent):
  """Also where a group of positions is partly in the store, partly here."""
  store = store_lib.Store(str(tmp_path))
  depositing.deposit(scene.model, store, scene.ids[:160], name='front')
  made = depositing.deposit(
      scene.model, store, tokens(130, seed=4), parent='front',
      parent_length=parent, streaming=least(scene.model, 20_000, 10**9))
  layers = len(scene.model.config.kind_layers('global'))
  # Some at the graft, some at the first step; then host memory has them.
  blocks = -(-parent // made.manifest.fields.block) + 1
  assert 0 < made.usage.store_blocks_read <= 2 * layers * blocks
  assert made.tokens_computed == 130


def test_empty_continuation_runs_the_last_position_alone(scene):
  ours = grafting.graft(
      scene.model, scene.store, scene.made, streaming=least(scene.model))
  assert ours.logits().tobytes() == scene.model.prefill(
      scene.ids).logits().tobytes()
  assert (ours.tokens_restored, ours.tokens_computed) == (202, 1)


def test_verify_and_audit_stream(scene):
  report = verification.verify(
      scene.model, scene.store, scene.made, n_continuations=6,
      streaming=least(scene.model))
  assert report.ok and report.restored_only
  audited = verification.audit(
      scene.model, scene.store, scene.made, streaming=least(scene.model))
  assert audited.ok and audited.blocks_checked == 14
  some = verification.audit(
      scene.model, scene.store, scene.made, blocks=[5, 2],
      streaming=least(scene.model))
  assert some.ok and some.blocks_checked == 4
  with pytest.raises(errors.UsageError, match='blocks: expected 0 to 6, found'):
    verification.audit(scene.model, scene.store, scene.made, blocks=[7])


def test_speculation_sampling_and_forks_agree_with_memory(scene):
  ids = scene.ids[:100] * 2
  ours = scene.model.prefill(ids, streaming=least(scene.model))
  theirs = scene.model.prefill(ids)
  scene.model.self_test()
  assert ours.score(tokens(9, seed=3)) == theirs.score(tokens(9, seed=3))
  drawn = [c.generate(7, temperature=1.0, seed=4, num_samples=3, stop_ids=())
           for c in (ours, theirs)]
  assert drawn[0] == drawn[1]
  assert ours.length == 200
  assert ours.generate(24, stop_ids=(), speculate=16) == theirs.generate(
      24, stop_ids=(), speculate=1)
  assert same_state(ours, theirs)


def test_fork_is_independent(scene):
  ours = scene.model.prefill(scene.ids, streaming=least(scene.model))
  fork = ours.fork()
  fork.extend(tokens(50, seed=5))
  ours.extend(tokens(33, seed=6))
  assert same_state(fork, scene.model.prefill(
      scene.ids + tokens(50, seed=5)))
  assert same_state(ours, scene.model.prefill(
      scene.ids + tokens(33, seed=6)))


@pytest.mark.parametrize('sliding', ['full', 'window'])
@pytest.mark.parametrize('front', [0, 77])
def test_streamed_deposit_is_the_same_artifact(scene, tmp_path, sliding, front):
  """Also behind a parent that ends inside a page and a block."""
  model, made = scene.model, []
  for name, streaming in (('a', None), ('b', least(model))):
    store = store_lib.Store(str(tmp_path / name))
    parent = depositing.deposit(
        model, store, scene.ids[:front]) if front else None
    made.append(depositing.deposit(
        model, store, scene.ids[front:], parent, sliding=sliding,
        streaming=streaming))
  assert made[0].id == made[1].id
  assert made[1].tokens_computed == 203 - front
  assert made[1].tokens_resumed == 0
  again = depositing.deposit(
      model, store, scene.ids[front:], parent, sliding=sliding,
      streaming=least(model))
  assert again.existed and again.tokens_computed == 0


class _Stop(Exception):
  pass


@pytest.mark.parametrize('sliding', ['full', 'window'])
@pytest.mark.parametrize('front', [0, 77])
@pytest.mark.parametrize('at', [33, 110, 202])
def test_interrupted_deposit_goes_on(scene, tmp_path, sliding, front, at):
  model, streaming = scene.model, least(scene.model)
  store = store_lib.Store(str(tmp_path))
  own = tokens(290, seed=7)
  parent = depositing.deposit(
      model, store, scene.ids[:front]) if front else None

  def stop(done, total):
    assert total == front + 290
    if done >= front + at:
      raise _Stop

  with pytest.raises(_Stop):
    depositing.deposit(
        model, store, own, parent, sliding=sliding, streaming=streaming,
        progress=stop)
  assert len(store.list()) == (1 if front else 0)
  made = depositing.deposit(
      model, store, own, parent, sliding=sliding, streaming=streaming)
  assert made.tokens_computed + made.tokens_resumed == 290
  if at > 4 * CHUNK + CHUNK:
    assert made.tokens_resumed >= at - 5 * CHUNK
  elsewhere = store_lib.Store(str(tmp_path / 'other'))
  parent = depositing.deposit(
      model, elsewhere, scene.ids[:front]) if front else None
  assert made.id == depositing.deposit(
      model, elsewhere, own, parent, sliding=sliding).id


def test_context_is_extended_later_without_computing_it_again(scene, tmp_path):
  model, streaming = scene.model, least(scene.model)
  store = store_lib.Store(str(tmp_path))
  first = depositing.deposit(
      model, store, scene.ids[:150], streaming=streaming)
  more = depositing.deposit(
      model, store, scene.ids[150:], first, streaming=streaming)
  assert more.tokens_computed == 53
  ours = grafting.graft(model, store, more, streaming=streaming)
  assert ours.tokens_restored == 203
  ours.extend(tokens(5, seed=8))
  assert same_state(ours, model.prefill(scene.ids + tokens(5, seed=8)))


def test_streamed_context_is_deposited_as_a_child(scene, tmp_path):
  model = scene.model
  ours = grafting.graft(
      model, scene.store, scene.made, streaming=least(model))
  theirs = grafting.graft(model, scene.store, scene.made)
  made = []
  for context, name in ((ours, 'a'), (theirs, 'b')):
    context.generate(20, stop_ids=())
    made.append(depositing.deposit(
        model, store_lib.Store(str(tmp_path / name)), context))
  assert made[0].id == made[1].id


def test_a_context_cannot_be_deposited_with_streaming(scene):
  context = scene.model.prefill(scene.ids)
  with pytest.raises(errors.UsageError, match='expected token ids'):
    depositing.deposit(
        scene.model, scene.store, context, streaming=least(scene.model))


def test_refuted_streaming_is_refused_and_can_be_inexact(scene, monkeypatch):
  report = scene.model.self_test()
  monkeypatch.setattr(scene.model, '_report', dataclasses.replace(
      report, invariances=report.invariances | {'stream': False}))
  streaming = least(scene.model)
  streaming = streaming_lib.Streaming()
  for call in (
      lambda: scene.model.prefill(scene.ids, streaming=streaming),
      lambda: grafting.recompute(
          scene.model, scene.store, scene.made, streaming=streaming),
      lambda: verification.audit(
          scene.model, scene.store, scene.made, streaming=streaming)):
    with pytest.raises(errors.ClassMismatchError, match='refuted stream'):
      call()
  assert not engine.Context(scene.model, streaming=streaming).exact
  with pytest.raises(errors.ClassMismatchError, match='refuted stream'):
    grafting.graft(scene.model, scene.store, scene.made, streaming=streaming)
  with pytest.raises(errors.ClassMismatchError, match='refuted stream'):
    depositing.deposit(
        scene.model, scene.store, scene.ids[:50], streaming=streaming)
  context = grafting.graft(
      scene.model, scene.store, scene.made, None, 'inexact',
      streaming=streaming)
  assert not context.exact
  assert grafting.graft(scene.model, scene.store, scene.made).exact


def test_hot_positions_are_moved_and_written_in_place():
  """No program that a step runs copies or converts a whole buffer."""
  model = model_helpers.variant(model_helpers.tiny(), tile=4)
  programs = programs_lib.Programs(model.config, model.profile, model.params)
  streamed = streaming_lib.Streamed(
      programs, least(model, 150_000, 10**9))
  streamed.warm_up(model.params, [4, 32])
  streamed.cold.stop = streamed.base = 0
  layout = streamed.layout
  assert layout.hot not in (16, 32, 48) and layout.group not in (16, 32)
  streamed.make_room(layout.hot, 32)
  spec = model.config.spec('global')
  shapes = [
      f'u16[{len(model.config.kind_layers("global"))},1,{layout.hot},'
      f'{spec.kv_heads},{spec.head_dim}]',
      f'u16[{layout.group},{spec.kv_heads},{spec.head_dim}]',
      f'bf16[{layout.group},{spec.kv_heads},{spec.head_dim}]',
      f'f32[{layout.group},{spec.kv_heads},{spec.head_dim}]',
  ]
  seen = set()
  for name, program in programs._compiled.items():
    seen.add(name[0])
    for line in program.as_text().splitlines():
      if any(f' = {shape}' in line for shape in shapes):
        assert ' copy(' not in line and ' convert(' not in line, (name, line)
  assert seen == {'segment', 'fold', 'move'}
