"""Two runs that disagree are explained by where they first do."""

import json
import shutil

import pytest

import command_helpers
from kvgraft_jax import config as config_lib
from kvgraft_jax import divergence
from kvgraft_jax import errors
from kvgraft_jax import ledger as ledger_lib
from kvgraft_jax import run_stores
import model_helpers
import run_helpers

_IDS = model_helpers.tokens(100)
_KINDS = config_lib.TINY.layers


@pytest.fixture(scope='module', params=model_helpers.DTYPES)
def model(request):
  return model_helpers.exact(request.param)


@pytest.fixture(scope='module')
def good(tmp_path_factory):
  """Returns the lines and the directory of a run of 70 tokens."""
  directory = tmp_path_factory.mktemp('good')
  lines = run_helpers.lines_of(
      directory, model_helpers.exact().prefill(_IDS[:70]))
  return lines, run_helpers.write(directory, lines)


@pytest.fixture
def other(good, tmp_path):
  """Returns the same lines, to be changed, and a directory with their store."""
  shutil.copytree(good[1] / 'store', tmp_path / 'store')
  return json.loads(json.dumps(good[0])), tmp_path


def _only(directory_a, directory_b):
  """Returns the only divergence."""
  found = divergence.explain(directory_a, directory_b).divergences
  assert len(found) == 1, [str(d) for d in found]
  return found[0]


# A seeded fault: positions computed in front of it, its place, all positions,
# first stored sliding position.
_FAULTS = [
    ('K', 2, 30, 40, 70, 0),  # Global.
    ('V', 2, 30, 40, 70, 0),
    ('V', 4, 33, 40, 70, 0),  # The last layer: nothing behind it differs.
    ('K', 0, 15, 40, 70, 0),  # Sliding; the last position of a block.
    ('V', 1, 16, 40, 70, 0),  # The first of the next.
    ('K', 3, 0, 40, 70, 0),
    ('V', 3, 50, 64, 100, 0),  # The ring is full, and then overwritten.
    ('K', 1, 97, 99, 100, 64),  # The ring has wrapped.
    ('K', 2, 98, 100, 100, 64),  # Computed behind it: the last position alone.
]


@pytest.mark.parametrize('side, layer, position, before, total, base', _FAULTS)
def test_a_seeded_fault_is_named(
    model, tmp_path, side, layer, position, before, total, base):
  sliding = 'window' if base else 'full'
  sound = model.prefill(_IDS[:before])
  faulty, change = run_helpers.flip(
      sound, side, layer, position, head=1, element=7, base=base)
  runs = []
  for name, context in (('a', sound), ('b', faulty)):
    context.extend(_IDS[before:total])
    directory = tmp_path / name
    runs.append(run_helpers.write(directory, run_helpers.lines_of(
        directory, context, sliding=sliding)))
  found = divergence.explain(*runs)
  first = found.first
  start = position // run_helpers.BLOCK * run_helpers.BLOCK
  stop = min(start + run_helpers.BLOCK, total)
  assert first.what == side
  assert first.where == {
      'id': 'context', 'layer': layer, 'kind': _KINDS[layer], 'start': start,
      'stop': stop, 'position': position, 'kv_head': 1, 'element': 7,
      'differing': 1, 'values': (stop - start) * 2 * 32,
      'dtype': model.profile.dtype, 'largest': repr(change)}
  assert change > 0 and first.a != first.b
  assert f'{side} of layer {layer}' in str(first)
  assert f'position {position}, kv head 1' in str(first)
  # What the fault reached is counted; in front of it nothing differs.
  counts = found.counts['block']
  assert counts['differing'] >= 1 and counts['equal'] > counts['differing']
  assert not counts['only_a'] and not counts['only_b']
  # And the other way round the same place.
  assert divergence.explain(*runs[::-1]).first.where == first.where


def test_the_lowest_layer_is_first_also_behind_an_earlier_position(
    good, tmp_path):
  model = model_helpers.exact()
  context = model.prefill(_IDS[:40])
  context, _ = run_helpers.flip(context, 'K', 4, 3, 0, 0)
  context, _ = run_helpers.flip(context, 'V', 1, 20, 0, 0)
  context, _ = run_helpers.flip(context, 'K', 1, 20, 1, 2)
  context, _ = run_helpers.flip(context, 'K', 1, 21, 1, 3)
  context.extend(_IDS[40:70])
  run_helpers.write(tmp_path, run_helpers.lines_of(tmp_path, context))
  first = divergence.explain(good[1], tmp_path).first
  place = [first.where[k] for k in ('layer', 'position', 'kv_head', 'element')]
  assert (first.what, place) == ('K', [1, 20, 1, 2])
  assert first.where['differing'] == 2


@pytest.fixture(scope='module')
def faulty(tmp_path_factory):
  """Returns the directory of a run with a fault in K of layer 2, position 30.
  """
  directory = tmp_path_factory.mktemp('faulty')
  context, _ = run_helpers.flip(
      model_helpers.exact().prefill(_IDS[:40]), 'K', 2, 30, 1, 7)
  context.extend(_IDS[40:70])
  return run_helpers.write(
      directory, run_helpers.lines_of(directory, context))


@pytest.mark.parametrize('harm, reason', [
    ('lost', 'there is no store'),
    ('emptied', 'no artifact'),
    ('damaged', 'digest is'),
])
def test_without_a_store_the_block_is_named(
    good, faulty, tmp_path, harm, reason):
  b = tmp_path / 'b'
  shutil.copytree(faulty, b)
  if harm == 'lost':
    shutil.rmtree(b / 'store')
  elif harm == 'emptied':
    shutil.rmtree(b / 'store' / 'a')
  else:
    files = list(b.glob('store/a/*/*/global/c.*'))
    assert len(files) == 5
    for path in files:
      data = bytearray(path.read_bytes())
      data[:64] = bytes(64)
      path.write_bytes(data)
  found = divergence.explain(good[1], b)
  first = found.first
  assert (first.what, first.where['layer']) == ('K', 2)
  assert (first.where['start'], first.where['stop']) == (16, 32)
  assert 'position' not in first.where
  assert reason in first.where['coarse'], first
  assert 'somewhere in positions 16 to 31' in str(first)
  whole = divergence.explain(good[1], faulty)
  assert found.counts == whole.counts
  assert found.divergences[1:] == whole.divergences[1:]


def test_runs_that_agree(good, other):
  lines, directory = other
  # When and by whom it was run is no result.
  run_helpers.body(lines, 'run').update(command=['else'], created='later')
  run_helpers.write(directory, lines)
  found = divergence.explain(good[1], directory)
  assert found.divergences == [] and found.first is None
  assert found.counts['block'] == {
      'equal': 2 * 5 * 5, 'differing': 0, 'only_a': 0, 'only_b': 0}
  assert all(c['equal'] and not c['differing'] for c in found.counts.values())


# What is changed in the second run -> the only divergence.
_CHANGES = {
    'input': ('input', {'sha256': 'cd' * 32}, ('input', {'id': 'text'})),
    'config': (
        'run', {'config': {'model': 'tiny:0', 'sizes': {'block': 32},
                           'seed': 3}},
        ('config', {'name': 'seed', 'also': ['sizes.block']})),
    'model': ('run.model', {'fingerprint': 'ef' * 32}, ('model', {})),
    'tokenizer': ('run.model', {'tokenizer': 'x'}, ('tokenizer', {})),
    'template': ('run.model', {'template': 'x'}, ('template', {})),
    'profile': (
        'profile.profile', {'jax': '0.0.1', 'jaxlib': '0.0.1'},
        ('profile', {'id': 'bfloat16', 'name': 'jax', 'also': ['jaxlib']})),
    'class': ('profile.class', {'tile': '4'},
              ('class', {'id': 'bfloat16', 'name': 'tile'})),
    'tokens': (
        'input', {'token_ids': [*_IDS[:30], 6, *_IDS[31:70]],
                  'tokens_sha256': '12' * 32},
        ('tokens', {'id': 'text', 'position': 30})),
    'logits': ('logits', {'sha256': ['34' * 32]},
               ('logits', {'id': 'last', 'position': 69, 'differing': 1,
                           'rows': 1})),
    'last logits': ('artifact', {'artifact': '56' * 32},
                    ('logits', {'artifact': 'context', 'position': 69})),
    'key': ('artifact', {'artifact': '56' * 32, 'key': '78' * 32},
            ('artifact', {'id': 'context'})),
    'digest': ('digest', {'sha256': '78' * 32}, ('digest', {'id': 'state'})),
    'output': ('output', {'token_ids': [7, 9]}, ('output', {'id': 'answer'})),
    'score': ('score', {'value': False}, ('score', {'id': 'right'})),
    'missing': ('score', {'id': 'wrong'},
                ('missing', {'kind': 'score', 'id': 'right', 'part': 'value',
                             'count': 1})),
}


@pytest.mark.parametrize('name', _CHANGES)
def test_each_stage_is_found_alone(good, other, name):
  lines, directory = other
  path, change, (what, where) = _CHANGES[name]
  kind, _, inner = path.partition('.')
  body = run_helpers.body(lines, kind)
  (body[inner] if inner else body).update(change)
  run_helpers.write(directory, lines)
  found = _only(good[1], directory)
  assert (found.what, found.where) == (what, where)
  assert found.a != found.b
  assert str(found).startswith(what)


def test_stages_come_in_their_order(good, faulty, tmp_path):
  directory = tmp_path / 'b'
  directory.mkdir()
  shutil.copytree(faulty / 'store', directory / 'store')
  lines = [(line['kind'], line['body']) for line in map(
      json.loads, (faulty / 'ledger.jsonl').read_text().splitlines())]
  for path, change, _ in _CHANGES.values():
    kind, _, inner = path.partition('.')
    body = run_helpers.body(lines, kind)
    if 'artifact' not in change and body is not run_helpers.body(
        lines, 'score'):
      (body[inner] if inner else body).update(change)
  run_helpers.body(lines, 'score')['value'] = False
  run_helpers.write(directory, lines)
  found = divergence.explain(good[1], directory)
  assert [d.what for d in found.divergences] == [
      'input', 'config', 'model', 'tokenizer', 'template', 'profile', 'tokens',
      'K', 'logits', 'digest', 'output', 'score']
  assert found.divergences[7].where['position'] == 30


def test_what_is_no_run_is_refused(good, tmp_path):
  with pytest.raises(errors.KvgraftError, match=str(tmp_path)):
    divergence.explain(good[1], tmp_path)
  lines = json.loads(json.dumps(good[0]))
  del run_helpers.body(lines, 'artifact')['digests'][0]['parts']
  run_helpers.write(tmp_path, lines)
  with pytest.raises(errors.UsageError, match='artifact.*parts'):
    divergence.explain(good[1], tmp_path)


def test_damage_in_a_store_is_found_by_reading_it(good, other, tmp_path):
  lines, directory = other
  run_helpers.write(directory, lines)
  written = ledger_lib.read(directory)
  found = run_stores.check(directory, written)
  assert (found.blocks, found.unread, found.problems) == (2 * 5, [], [])
  path = next(directory.glob('store/a/*/*/global/c.*'))
  data = bytearray(path.read_bytes())
  data[-8] ^= 1
  path.write_bytes(data)
  found = run_stores.check(directory, written)
  assert found.blocks < 10 and found.problems
  assert all('artifact "context"' in p for p in found.problems)
  result = command_helpers.call('ledger', 'recheck', directory, '--full')
  assert result.rc == 1 and result.json['blocks_read'] == found.blocks
  assert result.json['problem_list'] == found.problems
  assert result.stdout.splitlines()[-2].startswith('FAILED: ')
  # The ledgers agree, and that is all that is said.
  text = command_helpers.call('ledger', 'diff', good[1], directory).stdout
  assert 'no store was read' in text and '--full` reads them' in text
  next(directory.glob('store/a/*/*/tokens')).write_bytes(b'')
  assert 'tokens are lost' in run_stores.check(directory, written).problems[0]
  run_helpers.body(lines, 'artifact')['digests'][0]['parts'][0][2] = '0' * 64
  third = run_helpers.write(tmp_path / 'third', lines)
  result = command_helpers.call('ledger', 'recheck', third, '--full')
  assert result.rc == 0 and result.json['stores_missing'] == 1
  assert 'not read: line 4 (n 3), artifact "context"' in result.stdout
  shutil.copytree(good[1] / 'store', third / 'store')
  found, = run_stores.check(third, ledger_lib.read(third)).problems
  assert 'its digests are not those' in found


def test_a_default_is_told(good, other):
  lines, directory = other
  mine = json.loads(json.dumps(good[0]))
  for run, page in ((mine, None), (lines, 32)):
    run_helpers.body(run, 'run')['config'] = {'page': page}
  page = run_helpers.body(lines, 'profile')['profile']['page']
  first, = divergence.explain(
      run_helpers.write(directory / 'a', mine),
      run_helpers.write(directory / 'b', lines)).divergences
  assert (first.a, first.b) == (f'default ({page})', '32')


def test_figures_that_differ(good, other):
  lines, directory = other
  mine = json.loads(json.dumps(good[0]))
  for run, kl in ((mine, '0.25'), (lines, '0.5')):
    logits = run_helpers.body(run, 'logits')
    run[-1:-1] = [
        ('logits', logits | {'id': 'more', 'sha256': ['12' * 32]}),
        ('compare', {
            'id': 'c', 'a': 'last', 'b': 'more', 'group': {}, 'rows': 1,
            'equal': 0, 'argmax_agree': 1, 'kl': [kl], 'max_abs': ['1.0']})]
  found = divergence.explain(
      run_helpers.write(directory / 'a', mine),
      run_helpers.write(directory / 'b', lines))
  assert found.results_equal and found.first.what == 'compare'
  assert (found.first.where, found.first.b) == (
      {'id': 'c', 'field': 'kl'}, '["0.5"]')


def test_a_ledger_with_problems_is_refused(good, other):
  lines, directory = other
  run_helpers.body(lines, 'score')['value'] = False
  run_helpers.write(directory, lines)
  for args in (('diff', good[1], directory), ('diff', directory, good[1]),
               ('preregister', directory, f'--out={directory}/r.json')):
    line = command_helpers.refusal(1, 'ledger', *args)
    assert 'value is false, re-derived true' in line
    assert f'`kvgraft ledger recheck {directory}`' in line


def test_the_command(good, faulty, other):
  same = command_helpers.ok('ledger', 'diff', good[1], good[1])
  assert same['equal'] is True and same['first'] is None
  assert same['results_equal'] is True
  lines, directory = other
  run_helpers.body(lines, 'run')['config'] = {'seed': 3}
  run_helpers.write(directory, lines)
  result = command_helpers.call('ledger', 'diff', good[1], directory)
  assert (result.json['equal'], result.json['results_equal']) == (False, True)
  count = sum(c['equal'] for k, c in same['counts'].items() if k != 'argmax')
  assert result.stdout.splitlines()[-2] == (
      f'results: {count} of {count} equal; settings differ')
  result = command_helpers.call('ledger', 'diff', good[1], faulty)
  assert result.rc == 1 and result.json['equal'] is False
  assert result.json['results_equal'] is False
  first = result.json['first']
  assert first['what'] == 'K'
  assert (first['where']['layer'], first['where']['position']) == (2, 30)
  assert 'K of layer 2 (global)' in result.stdout.splitlines()[0]
  line = command_helpers.refusal(2, 'ledger', 'diff', good[1])
  assert '--other is missing' in line
