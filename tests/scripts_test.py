"""The benchmark and the device check run, and report what they promise."""

import copy
import gzip
import hashlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

import check_device
import cli_helpers

SCRIPTS = pathlib.Path(check_device.__file__).parent


def _script(name, *args, timeout_s=300):
  env = cli_helpers.environment()
  env['PYTHONPATH'] = os.pathsep.join(
      [str(SCRIPTS.parent), env.get('PYTHONPATH', '')])
  return subprocess.run(
      [sys.executable, str(SCRIPTS / name), *args], env=env,
      capture_output=True, text=True, timeout=timeout_s, check=False)


def test_bench_reports_every_section():
  done = _script('bench_graft.py', '--quick', '--lengths=40')
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  report = json.loads(lines[-1])
  assert report['sha256_equal'] is True
  entry = report['ttft']['40']
  assert entry['cold_tokens_computed'] == 40 + report['tile']
  assert entry['graft_tokens_computed'] == report['tile']
  assert entry['ratio'] == pytest.approx(entry['cold_s'] / entry['graft_s'])
  assert {'cold_s', 'graft_s', 'prefill_tokens_s', 'decode_s_token', 'parts_s',
          'sha256_equal'} <= entry.keys()
  assert report['restore']['40'].keys() == {
      'bytes', 'file_bytes', 'readinto_gb_s', 'read_unverified_gb_s',
      'read_verified_gb_s', 'graft_unverified_gb_s', 'graft_verified_gb_s'}
  assert report['startup']['40']['sha256'] == entry['logits_sha256']
  assert [row['capacity'] for row in report['capacity']] == [256, 1024]
  # Nothing of the cache's size is kept beside it.
  assert len({row['temp_bytes'] for row in report['capacity']}) == 1
  assert {'profile', 'class', 'environment', 'peak_bytes', 'load_before',
          'load_after'} <= report.keys()
  assert 'what limits the graft' in done.stdout


def test_texts_are_prose_once_each_and_the_same_every_time(tmp_path):
  prose = 'It is the word of one who can not be told that he is in it.\n'
  root = tmp_path / 'doc'
  for name, text in {
      'a/README': '# A title\n\n' + prose * 40,
      'a/README.txt': prose * 50, 'b/README.md': prose * 50,  # Equal.
      'b/NEWS.gz': prose * 60, 'b/copyright': prose * 70,
      'b/changelog.gz': prose * 80, 'b/FAQ': prose,  # Too short.
      'b/TODO': 'lorem ipsum dolor ' * 200, 'b/bugs.html': '<p>' + prose * 90,
      'b/doc.pdf': prose * 90, 'c/README': prose * 40 + '\xe9'}.items():
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    data = text.encode('latin-1')
    path.write_bytes(gzip.compress(data) if path.suffix == '.gz' else data)
  (root / 'd').symlink_to(root / 'a')
  args = ('--model=tiny:0', f'--roots={root}')
  size = len(prose) * 50 + len('README.txt of a\n\n')
  trees = []
  for out in ('x', 'y'):
    done = _script('collect_texts.py', *args, '--tokens=9000',
                   f'--out={tmp_path / out}')
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    trees.append({
        str(p.relative_to(tmp_path / out)): p.read_bytes()
        for p in (tmp_path / out).rglob('*') if p.is_file()})
  assert trees[0] == trees[1]
  rows = [json.loads(line) for line in trees[0].pop('texts.jsonl').splitlines()]
  assert [row['kind'] for row in rows] == ['prose', 'prose', 'news']
  assert {row['file']: row['tokens'] for row in rows[:2]} == {
      'a/README.txt': 11 + 40 * len(prose), 'a/README-1.txt': size}
  assert report['tokens'] == sum(map(len, trees[0].values()))
  assert trees[0]['b/NEWS.txt'] == f'NEWS of b\n\n{prose * 60}'.encode()
  for row in rows:
    text = trees[0].pop(row['file'])
    assert hashlib.sha256(text).hexdigest() == row['sha256']
    assert row['path'].startswith(f'{root}/{row["package"]}/')
  assert not trees[0]
  again = _script('collect_texts.py', *args, '--tokens=9', f'--out={root}')
  assert again.returncode == 2 and 'empty directory' in again.stderr
  more = _script('collect_texts.py', *args, '--tokens=90000',
                 f'--out={tmp_path / "z"}')
  assert more.returncode == 1 and 'lower --tokens' in more.stderr
  assert json.loads(more.stdout)['texts'] == 5


def test_bench_refuses_an_unknown_section():
  done = _script('bench_graft.py', '--quick', '--sections=ttft,speed')
  assert done.returncode == 2
  assert 'found speed' in done.stderr


def test_speculation_bench_compares_and_counts():
  done = _script('bench_speculation.py', '--quick', '--rows=4,8')
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert report['equal'] is True and report['rows_in_force'] == {
      '4': 4, '8': 8}
  for group in ('repeating', 'other'):
    assert report[group].keys() == {'4', '8'}
    for found in report[group].values():
      assert found['equal'] == dict.fromkeys(
          ('tokens', 'logits', 'cache', 'deposit'), found['prompts'])
      assert found['prompts'] == 2 and found['tokens'] > found['steps'] > 0
      assert found['seconds'] > 0 and found['wall_ratio'] > 0
  assert report['repeating']['8']['steps'] < report['repeating']['4']['steps']
  assert 'tokens/step' in done.stdout
  assert _script('bench_speculation.py', '--rows=1').returncode == 2


def test_stream_bench_compares_and_measures(tmp_path):
  out = tmp_path / 'out.json'
  done = _script('bench_stream.py', 'equal', 'long', '--quick', f'--out={out}')
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert report == json.loads(out.read_text(encoding='utf-8'))
  assert report['equal'] is True
  run, = report['equal_runs']
  assert run['killed'] and run['ids_equal'] and run['length'] == 700
  assert run['tokens_resumed'] + run['tokens_computed_after'] == 700
  assert 0 < run['tokens_resumed'] <= 352
  assert run['device_kv_bytes'] <= run['device_kv_limit'] < (
      run['memory_kv_bytes'] / 4)
  found = run['verify']
  assert found['sha256_equal'] == found['continuations'] == 4
  assert found['max_kl'] == 0 and found['greedy_tokens_equal'] == 64
  assert run['store_bytes_read'] > 0
  long = report['long']
  assert [row['length'] for row in long['rows']] == [300, 600, 1200, 1400]
  assert len(long['device_kv_bytes']) == 1
  for row in long['rows']:
    assert row['store']['store_bytes_a_step'] >= row['read_bytes'] > 0
    assert row['host']['store_bytes_a_step'] < row['read_bytes']
    assert row['host']['host_kv_bytes'] > row['store']['host_kv_bytes'] == 0
    assert row['step_to_read'] == pytest.approx(
        row['store']['step_s'] / row['read_s'])
    assert len(row['store']['steps_s']) == 3
  assert long['slope_s_per_position'].keys() == {
      'step_host', 'step_store', 'read', 'read_unverified'}
  audit = long['audit']
  assert audit['blocks_equal'] == audit['blocks_checked'] == 10
  assert len(audit['blocks']) == 5
  assert 'step/read' in done.stdout and 'audit: 10 of 10' in done.stdout
  refused = _script('bench_stream.py', 'long')
  assert refused.returncode == 2 and '--store and --artifact' in refused.stderr


def test_corpus_bench_plants_routes_answers_and_goes_on(tmp_path):
  pytest.importorskip('bm25s')
  work, out = tmp_path / 'work', tmp_path / 'out.json'
  args = ('bench_corpus.py', '--quick', f'--work={work}', f'--out={out}')
  done = _script(*args)
  assert done.returncode == 0, done.stderr
  report = json.loads(done.stdout.splitlines()[-1])
  assert report == json.loads(out.read_text(encoding='utf-8'))
  assert report['exact'] is report['nothing_computed_again'] is True
  built = report['corpora']
  assert built['100']['tokens_computed'] == built['100']['tokens']
  assert built['10']['documents'] < built['50']['documents'] < 6
  rows = report['rows']
  for row in rows:
    sentence = f'The access code of the {row["name"]} archive is {row["code"]}.'
    text = (work / 'texts' / row['source']).read_text(encoding='utf-8')
    found = text.index(sentence, row['start'], row['stop'])
    assert text.count(row['code']) == text.count(row['name']) == 1
    assert text[found - 2:found] == '\n\n'
    assert found / len(text) == pytest.approx(row['depth'], abs=0.2)
    assert len(row['right_passage']['logprobs']) == 4
    assert row['right_passage']['tokens_restored'] == row['tokens']
    assert row['fresh_tokens_computed'] == (
        row['tokens'] + row['right_passage']['tokens_computed'])
    for router in ('bm25', 'model'):
      assert row[router]['right'] == (row[router]['passage'] == row['passage'])
  found = report['summary']
  assert found['facts'] == found['exact'] == len(rows) == 6
  assert found['routers']['address']['right'] == 6
  assert found['routers']['bm25']['right'] == sum(
      row['bm25']['right'] for row in rows)
  assert set(found['answers']) == {
      'right passage', 'no passage', 'routed by bm25', 'routed by model'}
  for depths in ('by_document_depth', 'by_passage_depth'):
    assert sum(row['facts'] for row in found[depths]) == 6
  assert report['times'].keys() == {'10', '50', '100'}
  for row in report['times'].values():
    assert row['total_s'] > 0 and row['exact'] and row['questions'] > 0
    assert 0 <= row['right'] <= row['questions']
    assert row['device_kv_bytes'] == report['times']['100']['device_kv_bytes']
  assert report['verify']['equal'] == report['verify']['passages'] == 1
  assert 'by tenth of the document' in done.stdout
  again = _script(*args)
  assert again.returncode == 0, again.stderr
  after = json.loads(again.stdout.splitlines()[-1])
  assert after['corpora']['100']['tokens_computed'] == 0
  assert after['summary']['answers'] == found['answers']
  other = _script('bench_corpus.py', '--quick', f'--work={work}', '--facts=3')
  assert other.returncode == 2 and 'expected at least 4' in other.stderr


REPORT = {
    'matmuls': {
        'a.qkv': {'equal_128': {'1': [16, 64, 128]}, 'equal_512': {'1': [512]}},
        'a.attention': {'equal_128': {'1': [1, 4, 16, 128]}},
    },
    'equality': {'chunk_128': {'equal': True}, 'tile_16': {'equal': True}},
}


def test_recommendation_follows_the_table_and_the_whole_model():
  assert check_device.tiles(REPORT, 128) == [16, 128]
  assert check_device.recommend(REPORT)['tile'] == 16
  refuted = copy.deepcopy(REPORT)
  refuted['equality']['tile_16']['equal'] = False
  assert check_device.recommend(refuted)['tile'] == 128
  lost = copy.deepcopy(REPORT)
  lost['matmuls']['a.qkv'] = None
  assert check_device.recommend(lost)['tile'] == 128
  assert 'incomplete' in check_device.recommend(lost)['reason']


def test_a_part_that_dies_or_hangs_is_reported(tmp_path):
  order = {'part': 'no such part', 'out': str(tmp_path / 'out')}
  assert 'exit code 1' in check_device.run_part(order, dict(os.environ), 1e12)
  order['part'] = 'profile'
  assert 'out of time' in check_device.run_part(order, dict(os.environ), 0)


def test_device_check_keeps_its_report_when_time_ends(tmp_path):
  out = tmp_path / 'out.json'
  done = _script('check_device.py', '--rehearse', f'--out={out}',
                 '--budget_s=12', timeout_s=60)
  last = json.loads(done.stdout.splitlines()[-1])
  report = json.loads(out.read_text(encoding='utf-8'))
  assert last['skipped'] == len(report['skipped']) > 0
  assert last['elapsed_s'] < 20
  assert report['speed'] is None
  assert 'default profile should be' in done.stdout


@pytest.mark.slow
def test_device_check_rehearsal(tmp_path):
  out = tmp_path / 'out.json'
  done = _script('check_device.py', '--rehearse', f'--out={out}',
                 '--budget_s=900', timeout_s=900)
  assert done.returncode == 0, done.stderr
  report = json.loads(out.read_text(encoding='utf-8'))
  assert not report['errors'] and not report['skipped']
  for part in (report, report['large']):
    assert part['repeat'] == {'run_to_run': True, 'process_to_process': True}
    assert part['graft']['verify_200']['sha256_equal'] == 10
    assert part['graft']['verify_200']['restored_only'] is True
    assert part['speed']['tokens_200']['decode_tokens_s'] > 0
  assert report['profile']['bfloat16']['factors']['chunk'] == '512'
  # Columns do not change the bits of a row on CPU; a one-row product does.
  entry = report['matmuls']['gemma3-270m.qkv']
  assert entry['equal_512']['1'] == entry['equal_512']['8']
  assert {64, 128, 256, 512} <= set(entry['equal_512']['1'])
