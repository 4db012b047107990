"""The HTML report: what it says, that it is safe, and that it can be read."""

import copy
import html.parser
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest

import cli_helpers
import command_helpers
from kvgraft_jax import errors
from kvgraft_jax import findings
from kvgraft_jax import ledger
from kvgraft_jax import recheck
from kvgraft_jax import report
from kvgraft_jax import report_page
from kvgraft_jax import report_plots
import report_helpers

_CHROMIUM = shutil.which('chromium')
_VOID = {'br', 'col', 'hr', 'img', 'input', 'link', 'meta'}
# Attributes by which a page loads something.
_LOADS = {'src', 'srcset', 'data', 'poster', 'action', 'background', 'ping'}


class Page(html.parser.HTMLParser):
  """The structure of a page.

  Attributes:
    elements: (name, attributes, text within) in order.
    wrong: end tags that end nothing.
    text: of the whole page, one space for each run of white space.
  """

  def __init__(self, source: str):
    super().__init__()
    self.elements: list[tuple[str, dict[str, str], list[str]]] = []
    self.wrong: list[str] = []
    self._open: list[tuple[str, dict[str, str], list[str]]] = []
    self.feed(source)
    self.close()
    self.wrong += [name for name, _, _ in self._open]
    self.text = ' '.join(''.join(
        self.elements[0][2] if self.elements else []).split())

  def handle_starttag(self, tag, attrs):
    element = tag, dict(attrs), []
    self.elements.append(element)
    if tag not in _VOID:
      self._open.append(element)

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs), []))

  def handle_endtag(self, tag):
    if self._open and self._open[-1][0] == tag:
      self._open.pop()
    else:
      self.wrong.append(tag)

  def handle_data(self, data):
    if self._open and self._open[-1][0] != 'style':
      for _, _, text in self._open:
        text.append(data)

  def all(self, *names: str):
    return [(n, a, ' '.join(''.join(t).split()))
            for n, a, t in self.elements if n in names]

  def rows(self, caption: str) -> list[list[str]]:
    """Returns the cells of the one table with this caption."""
    found, inside = [], False
    for name, _, text in self.all('caption', 'tr', 'th', 'td'):
      if name == 'caption':
        inside = caption in text
      elif inside and name == 'tr':
        found.append([])
      elif inside:
        found[-1].append(text)
    return found


def run_lines(*bodies):
  """Returns lines as `ledger.read` gives them, of (kind, body)."""
  lines = []
  for kind, body in bodies:
    line = {'body': body, 'kind': kind, 'n': len(lines),
            'prev': lines[-1]['hash'] if lines else recheck.NO_HASH}
    lines.append({**line, 'hash': recheck.line_hash(line)})
  return lines


@pytest.fixture(scope='module', name='folder')
def folder_fixture(tmp_path_factory):
  path = tmp_path_factory.mktemp('report') / 'run'
  report_helpers.write(path)
  assert not recheck.check(path).problems
  return path


@pytest.fixture(scope='module', name='source')
def source_fixture(folder):
  return report.render(folder)


@pytest.fixture(scope='module', name='page')
def page_fixture(source):
  return Page(source)


def check_structure(source: str, page: Page) -> None:
  """Checks what holds for every report."""
  assert source.startswith('<!DOCTYPE html>') and not page.wrong
  # Nothing is loaded, and nothing runs.
  for name, attributes, _ in page.all(*{n for n, _, _ in page.elements}):
    assert name not in ('script', 'link', 'img', 'iframe', 'object', 'embed',
                        'base', 'form', 'image', 'foreignobject'), name
    assert not _LOADS & attributes.keys(), (name, attributes)
    assert not any(a.startswith('on') for a in attributes), (name, attributes)
    for key, value in attributes.items():
      if key.rpartition(':')[2] == 'href':
        assert value.startswith('#'), (name, attributes)
      for url in re.findall(r'url\(([^)]*)\)', value or ''):
        assert url.startswith('#'), (name, attributes)
  style = re.search('<style>(.*?)</style>', source, re.S).group(1)
  assert 'url(' not in style and '@import' not in style
  # One language, ids once, links that lead somewhere.
  assert page.all('html')[0][1]['lang'] == 'en'
  ids = [a['id'] for _, a, _ in page.elements if 'id' in a]
  assert len(ids) == len(set(ids))
  for _, attributes, _ in page.all('a', 'use'):
    href = attributes.get('href')
    assert href and href[1:] in ids
  # Headings in order.
  levels = [int(n[1]) for n, _, _ in page.all('h1', 'h2', 'h3', 'h4')]
  assert levels[0] == 1 and levels.count(1) == 1
  assert all(b <= a + 1 for a, b in zip(levels, levels[1:]))
  # Tables and figures say what they are.
  for _, attributes, _ in page.all('th'):
    assert attributes['scope'] in ('row', 'col')
  assert len(page.all('table')) == len(page.all('caption'))
  assert all(text for _, _, text in page.all('caption', 'figcaption'))
  figures = len(page.all('figure'))
  assert figures == len(page.all('figcaption')) == len(page.all('svg'))
  images = [a for _, a, _ in page.all('div') if a.get('role') == 'img']
  assert len(images) == figures and all(a['aria-label'] for a in images)


def test_structure(source, page):
  check_structure(source, page)
  assert '://' not in source  # No string of this ledger has an address.
  # Overviews of all and of bfloat16, one plot a case, two of rounding.
  assert len(page.all('svg')) == 4 + len(report_helpers.CASES) + 2


def test_every_axis_has_a_unit(page):
  for _, attributes, text in page.all('div', 'svg'):
    label = attributes.get('aria-label', '')
    if attributes.get('role') == 'img':
      # The rows of an overview are named by their cases.
      axes = 1 if 'one row a case' in label else 2
    elif 'viewBox' in attributes:
      labels = re.findall(r'[A-Za-z ]+\([a-z0-9 ]+\)', text.replace(
          '0 (equal)', ''))
      assert len(labels) == axes, (text, labels)


def test_overviews_say_what_is_compared_and_group_by_dtype(page):
  found = [text for name, _, text in page.all('svg') if 'against fresh' in text]
  assert len(found) == 4 and 'case (name)' not in page.text
  for text, zoom in zip(found, (False, False, True, True)):
    assert ('bfloat16 cases only' if zoom else 'all cases') in text
    assert ('float64' in text) is not zoom
  for text in found[::2]:
    assert 'fresh at M against fresh at 0' in text
  for text in found[1::2]:
    assert 'moved by M against fresh at M' in text
  rows = re.findall('slots|base|float32|float64|bfloat16', found[0].replace(
      'M = 4,096', ''))
  assert [r for r in rows if r != 'slots'] == [
      'bfloat16', 'base', 'float32', 'float32', 'float64', 'float64']


def test_one_ledger_gives_the_same_bytes(folder, source):
  code = ('import sys; from kvgraft_jax import report;'
          ' sys.stdout.buffer.write(report.render(sys.argv[1]).encode())')
  done = subprocess.run(
      [sys.executable, '-c', code, str(folder)], capture_output=True,
      env=cli_helpers.environment(
          PYTHONPATH=str(pathlib.Path(report.__file__).parents[1]),
          PYTHONHASHSEED='5'), timeout=300, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout == source.encode()


def test_sections_are_in_order_and_name_the_head(folder, page):
  assert [text for _, _, text in page.all('h2')] == [
      'What was found', 'Verdicts', 'Fifty-sample exactness',
      'Invariance matrix', 'Own-position study', 'Resources',
      'How it was computed', 'Conditions of verdicts', 'Further lines']
  lines = ledger.read(folder)
  head = lines[-1]['hash']
  assert page.all('h1')[0][2] == 'Evidence: gemma3-270m, 2026-11-29'
  assert f'{len(lines):,} lines' in page.text
  # A hash from the page itself would prove nothing.
  assert page.text.count(head) == 1
  assert 'python3 recheck.py DIR --head=HASH' in page.text
  assert 'kvgraft ledger recheck DIR --full' in page.text
  assert 'measurements on record' in page.text
  assert 'random weights' not in page.text
  assert 'A graft at its own position has every bit' in page.text


def test_verdicts_say_what_they_rest_on(source, page):
  head, *found = page.rows('What each checker ran')
  assert head == ['Verdict', 'Result', 'Ran', 'Because']
  rows = {row[0]: row for row in found}
  assert len(rows) == len(found) == 4
  assert rows['fifty'][1] == '✓ passed'
  assert rows['fifty'][3] == 'fifty/bfloat16/equal: 200, == 200'
  assert rows['self_test'][3] == 'no figure of this ledgerrun: true'
  # One row for the cases that passed alike, one for what failed.
  shared = rows['study, 4 verdicts:' + ', '.join(report_helpers.CASES)]
  assert shared[1:] == ['✓ passed', 'studyoffsets: [0, 8, 128, 4096]', ''.join(
      f'study/…/own/{m}/equal: 16, == 16' for m in report_helpers.OFFSETS)]
  failed = rows['study/elsewhere']
  assert failed[1] == '✗ FAILED'
  assert re.match(r'study/base/moved/8/kl_median: [0-9.e-]+, == 0', failed[3])
  assert failed[3].endswith('and 5 more, see Conditions of verdicts')
  assert '7 verdicts, 6 passed.' in page.text
  listed = page.rows('Figures that verdicts rest on')[1:]
  assert len(listed) == 1 + 16 + 17
  assert listed[1] == ['study/base', 'study/base/own/0/equal', '16', '== 16']
  assert 'data-label="Because"' in source


def test_verdicts_that_failed_or_differ_stand_alone():
  def verdict(case, passed, value):
    return 'verdict', {
        'id': f'study/{case}', 'checker': 'study', 'passed': passed,
        'ran': {'case': case}, 'evidence': {}, 'because': [
            {'summary': f'study/{case}/n', 'op': '==', 'value': value}]}

  lines = run_lines(
      ('run', report_helpers.run_body()),
      *(('summary', {'id': f'study/{case}/n', 'value': 2}) for case in 'abcde'),
      verdict('a', True, 2), verdict('b', False, 3), verdict('c', True, 2),
      verdict('d', False, 3), verdict('e', True, '2'))
  page = Page(report.render_lines(lines))
  assert [row[0] for row in page.rows('What each checker ran')[1:]] == [
      'study, 3 verdicts:a, c, e', 'study/b', 'study/d']
  page = Page(report.render_lines(lines[:7]))
  assert '1 verdict, 1 passed.' in page.text
  assert not re.search(
      r'\b1 (verdicts|cases|lines|figures|fields|problems)\b', page.text)


def test_findings_that_the_figures_do_not_give_are_marked(folder, page):
  warning = 'the figures of this ledger do not give the text above'
  assert page.text.count(warning) == 1  # The helper's own words.
  lines = [dict(line) for line in ledger.read(folder)]
  run = report_helpers.run_body(config={
      'model': 'tiny:0', 'dtypes': ['bfloat16'], 'offsets': [0, 8]}, model={
          'source': 'tiny:0'})
  figures = [('summary', {'id': f'invariance/bfloat16/{name}', 'value': value})
             for name, value in (('schedules', 3), ('results', 1),
                                 ('promised/schedules', 3),
                                 ('promised/results', 1))]
  lines = run_lines(('run', run), *figures)
  derived = findings.sentences(lines)
  assert derived
  notes = [('note', {'role': 'finding', 'text': text}) for text in derived]
  good = Page(report.render_lines(run_lines(('run', run), *figures, *notes)))
  assert all(text in good.text for text in derived)
  assert 'the figures' not in good.text.split('What was found', 2)[2].split(
      'Verdicts')[0]
  assert 'random weights: figures test the software, not a language model' in (
      good.text)
  # A sentence that says more than the figures, and one that was left out.
  false = ('note', {'role': 'finding', 'text': 'Everything is exact.'})
  bad = Page(report.render_lines(
      run_lines(('run', run), *figures, *notes[:-1], false)))
  assert f'Everything is exact. Warning: {warning}' in bad.text
  assert f'which the run did not record. {derived[-1]}' in bad.text
  # Another version may say it otherwise; that is no mark of a false ledger.
  older = [(kind, body | {'rules': findings.VERSION + 1})
           for kind, body in notes]
  text = Page(report.render_lines(run_lines(('run', run), *figures, *older))
              ).text
  assert 'another version of this program wrote these sentences' in text
  assert warning not in text


def test_exactness_and_invariance(page):
  whole, cut = page.rows('Grafted against fresh logits')[1:]
  assert whole == ['bfloat16, whole artifact', '50', '200 of 200',
                   '200 of 200', '0', '0']
  assert cut[:3] == ['bfloat16, cut to 1,024 tokens', '1', '4 of 4']
  assert page.rows('Hashes of the graft')[1] == ['bfloat16, greedy', '1 of 1']
  head, *rows = page.rows('State of each schedule')
  assert head == ['Schedule', 'bfloat16', 'float32', 'What it is']
  states = {row[0]: [cell.split(' ')[0][:6] for cell in row[1:3]]
            for row in rows}
  digest = report_helpers.sha('float32', True)[:10]
  assert states['capacity'] == ['=', '='] and states['rows_4'] == ['=', '≠']
  assert rows[1][2] == f'≠ differs †{digest}' and rows[1][3] == 'by rows_4'


def test_study_has_each_figure_of_the_ledger(folder, page):
  figures = {line['body']['id']: line['body']['value']
             for line in ledger.read(folder) if line['kind'] == 'summary'}
  moved = {(row[0], row[1]): row for row in page.rows('moved: stored at 0')}
  assert len(moved) == 1 + 4 * 4
  assert moved['Case', 'M (tokens)'] == [
      'Case', 'M (tokens)', 'Rows with equal SHA-256', 'Same argmax',
      'KL of a row, median over rows (nats)',
      'KL of a row, maximum over rows (nats)',
      'Largest logit difference of a row, median over rows',
      'Largest logit difference of a row, maximum over rows']
  assert 'shown where there are at least 100; here some are fewer' in page.text
  # A figure that the study leaves out stands among the others.
  others = {row[0]: row[1] for row in page.rows('Summary figures, each')}
  name = 'study/float32/moved/4096/kl_p99'
  assert others[name] == figures[name]
  found = moved['float32', '4,096']
  assert found[2:4] == ['0 of 16', '16 of 16']
  for at, name in enumerate(
      ('kl_median', 'kl_max', 'max_abs_median', 'max_abs_max'), 4):
    assert float(found[at]) == pytest.approx(
        float(figures[f'study/float32/moved/4096/{name}']), rel=5e-3)
  own = page.rows('own: grafted at its own position')[1:]
  assert len(own) == 16 and {tuple(row[2:]) for row in own} == {
      ('16 of 16', '0')}
  rounding = page.rows('Medians over the offsets')[1:]
  assert 'all cases and offsets together: 256 of 256.' in page.text  # Own.
  for row in rounding:
    assert float(row[5]) == pytest.approx(float(row[6]), rel=0.9), row


def test_resources_invent_nothing(page):
  head, fifty, study = page.rows('What each part took')
  assert fifty[-1] == 'not measured' and study[-1] == '1,234 (nvml)'
  assert fifty[head.index('Work (TFLOP)')] == '51.2'
  assert study[head.index('Work (TFLOP)')] == 'not known'
  assert 'no RAPL package under /sys/class/powercap' in page.text
  assert 'Written (MB)' not in head  # Nobody measured it.
  assert ('Not known of any part: Written (MB), Peak on the device (MB).'
          in page.text)


def test_setup(page):
  assert "kvgraft evidence --model=gemma3-270m '--out=my run'" in page.text
  rows = page.rows('Everything that may fix')
  for row in (['chunk', '512 †', 'all'], ['page', '128', 'all'],
              ['dtype', 'bfloat16', 'bfloat16'],
              ['dtype', 'float32', 'float32']):
    assert row in rows
  rows = page.rows('What fixes the bits')
  assert rows[1] == ['bfloat16', report_helpers.sha('bfloat16'),
                     report_helpers.sha('bfloat16', 1)]
  rows = {row[0]: row[1:] for row in page.rows('Self-test')}
  assert rows['rows_4'] == ['= equal', '≠ differs']
  assert rows['mesh'] == ['not run', 'not run']


def test_profiles_without_a_self_test_have_none():
  factors = {'page': '64'}
  lines = run_lines(('run', report_helpers.run_body()), *(
      ('profile', {'id': name, 'profile': factors, 'class': factors,
                   'profile_fingerprint': 'a' * 64,
                   'class_fingerprint': 'a' * 64, 'self_test': {}})
      for name in ('float64', 'study/half_page')))
  page = Page(report.render_lines(lines))
  assert page.rows('Everything that may fix')[1:] == [['page', '64', 'all']]
  assert 'Self-test' not in page.text
  assert page.rows('What fixes the bits')[2] == ['study/half_page'] + [
      'a' * 64] * 2


def test_p99_is_shown_of_a_hundred_rows():
  over = {'kind': 'compare', 'where': {
      'group.part': 'study', 'group.case': 'base', 'group.what': 'moved',
      'group.m': 8}}
  for rows, shown in ((99, False), (100, True)):
    page = Page(report.render_lines(run_lines(
        ('run', report_helpers.run_body()),
        *(('summary', {'id': f'study/base/moved/8/{name}', 'over': over,
                       'field': field, 'rule': rule, 'value': value})
          for name, field, rule, value in (
              ('rows', 'rows', 'sum', rows), ('kl_p99', 'kl', 'p99', '0.5'),
              ('kl_max', 'kl', 'max', '0.7'))))))
    head, row = page.rows('moved: stored at 0')
    assert (dict(zip(head, row)).get('KL of a row, p99 over rows (nats)')
            == ('0.500' if shown else None))
    assert ('here some are fewer' in page.text) is not shown


def test_missing_parts_are_one_line_and_unknown_ones_a_table():
  lines = run_lines(
      ('run', report_helpers.run_body(run='flywheel')),
      *(('score', {'id': f's{i}', 'rule': 'integer', 'answer': '7',
                   'expected': '7', 'value': True,
                   'group': {'part': 'flywheel', 'round': i}})
        for i in range(60)),
      ('weather', {'id': 'w', 'sky': {'colour': 'blue'}, 'list': list('abcde'),
                   'text': 'long ' * 100}),
      ('recovered', {'dropped_bytes': 17, 'adopted_lines': 2}))
  source = report.render_lines(lines)
  page = Page(source)
  check_structure(source, page)
  assert page.all('h1')[0][2].startswith('Flywheel: gemma3-270m')
  for title in ('What was found', 'Verdicts', 'Fifty-sample exactness',
                'Invariance matrix', 'Own-position study', 'Resources'):
    assert f'{title}: nothing of it in this ledger.' in page.text
  assert not page.all('svg')
  rows = page.rows('60 lines of kind score, part flywheel; 20 of them not')
  assert len(rows) == 41 and 'group.round' in rows[0]
  head, row = page.rows('1 line of kind weather')
  assert row[head.index('sky.colour')] == 'blue'
  assert row[head.index('list')] == 'a, b, c, … (5 in all)'
  assert row[head.index('text')].endswith('… (500 characters)')
  assert 'not finished: no end line' in page.text
  assert ('bytes of a torn line that were dropped: 17, lines adopted: 2'
          in page.text)


@pytest.mark.parametrize('poison', [
    '<script>alert(1)</script>"><img src=x onerror=alert(1)>\' onload=\'x'
    '</style></svg></title>{{ 7 * 7 }}{% raw %} &amp; ]]> $\\frac{x',
    '\x00\x07\x1b\ud800\u202e字\x85'])
def test_whatever_a_string_holds_is_text(folder, poison):
  """Values, free names and kinds; the structure is that of the harmless one."""
  free = ('config', 'profile', 'class', 'ran', 'evidence')
  lines = []
  for line in ledger.read(folder):
    body = {
        name: report_helpers.poisoned(value, poison, names=name in free)
        for name, value in line['body'].items()
    }
    for kept in ('role', 'group'):
      if kept in line['body']:
        body[kept] = line['body'][kept]
    if 'group' in body:
      body['group'] = {
          name: value if name in ('part', 'case')
          else report_helpers.poisoned(value, poison)
          for name, value in body['group'].items()}
    if line['kind'] == 'summary':
      case = f'base{poison.replace("/", "")}'
      body |= {
          'value': line['body']['value'], 'field': line['body']['field'],
          'rule': line['body']['rule'], 'over': copy.deepcopy(
              line['body']['over']),
          'id': line['body']['id'].replace('/base/', f'/{case}/')}
      if body['over']['where'].get('group.case') == 'base':
        body['over']['where']['group.case'] = case
    lines.append(line | {'body': body})
  lines.append(lines[-1] | {'kind': f'kind{poison}'})
  found = report.render_lines(lines)
  page = Page(found)
  check_structure(found, page)
  # Without the two of rounding, since no dtype is known.
  assert len(page.all('svg')) == 6  # Two overviews, one plot a case.
  found.encode()  # No lone surrogate is left.
  assert not re.search('[\x00-\x08\x0b-\x1f\x7f-\x9f]', found)
  shown = ' '.join(report_page.legible(poison).split())
  assert page.all('h1')[0][2].startswith(
      f'Evidence{shown}: gemma3-270m{shown}, 2026')
  assert f'kind kind{shown}' in page.text


def test_fields_of_another_shape_are_no_error():
  """A recheck names them; the report still shows the rest."""
  strange = [None, 3, 'x', [], ['y'], {}, {'a': {'b': []}}]
  for value in strange:
    lines = run_lines(('run', report_helpers.run_body(
        command=value, config=value, code=value, model=value, created=value)))
    for kind in ('profile', 'input', 'artifact', 'compare', 'digest', 'summary',
                 'verdict', 'resources', 'note', 'score', 'case', 'end',
                 'registration', 'recovered'):
      body = dict.fromkeys((
          'id', 'profile', 'class', 'self_test', 'digests', 'rows', 'equal',
          'kl', 'because', 'ran', 'evidence', 'energy', 'seconds', 'over',
          'value', 'text', 'status', 'tokens'), value)
      for group in (value, {'part': 'study', 'case': value, 'm': value},
                    {'part': 'fifty', 'dtype': value},
                    {'part': 'prefix', 'm': value}, {'part': 'invariance'}):
        lines += run_lines((kind, body | {'group': group, 'role': 'finding'}))
      lines += run_lines((kind, {}))
    source = report.render_lines(lines)
    check_structure(source, Page(source))


def test_a_damaged_ledger_is_refused(folder, tmp_path):
  copy = tmp_path / 'run'
  shutil.copytree(folder, copy)
  data = bytearray((copy / 'ledger.jsonl').read_bytes())
  data[len(data) // 2] ^= 1
  (copy / 'ledger.jsonl').write_bytes(data)
  with pytest.raises(errors.DamageError):
    report.render(copy)
  with pytest.raises(errors.UsageError, match='holds no line'):
    report.render_lines([])


@pytest.mark.parametrize('value, shown', [
    (None, '–'), (0, '0'), (1234567, '1,234,567'), ('0.0', '0'), ('1.0', '1'),
    ('0.0015', '0.00150'), ('0.12345', '0.123'), ('12.345', '12.3'),
    ('12345.6', '12,346'), ('1.5e-05', '1.50e-5'), ('2e+30', '2.00e30'),
    ('-0.25', '-0.250'), ('nan', 'nan'), ('text', 'text'), (True, 'true'),
    ('9' * 400, '9' * 400)])
def test_numbers(value, shown):
  assert report_page.number(value) == shown


def test_zero_stands_in_a_band_of_its_own():
  values = {8: 1e-3, 128: 0.0}
  svg = report_plots.kl_by_offset('c', {('own', 'median'): values}, {}, 'p')
  assert '0 (equal)' in svg and '1e-3' in svg
  # The lower end of the axis is below the smallest value, and in no decade.
  zeros = report_plots.kl_by_offset(
      'c', {('own', 'median'): {8: 0.0}}, {}, 'p')
  assert '0 (equal)' in zeros


def test_without_matplotlib_one_line_says_so(folder, tmp_path):
  code = ('import sys; sys.modules["matplotlib"] = None\n'
          'from kvgraft_jax.apps import main\n'
          'sys.exit(main.main(sys.argv[1:]))')
  done = subprocess.run(
      [sys.executable, '-c', code, 'report', str(folder), '-o',
       str(tmp_path / 'out.html')], capture_output=True, text=True,
      env=cli_helpers.environment(
          PYTHONPATH=str(pathlib.Path(report.__file__).parents[1])),
      timeout=60, check=False)
  assert done.returncode == 2 and not done.stdout
  assert done.stderr.startswith('kvgraft report: ') and (
      "pip install 'matplotlib" in done.stderr)
  assert done.stderr.count('\n') == 1 and not list(tmp_path.iterdir())


def test_the_ledger_itself_is_not_overwritten(folder, tmp_path):
  (tmp_path / 'link').symlink_to(folder / 'ledger.jsonl')
  before = {f: f.read_bytes() for f in folder.iterdir() if f.is_file()}
  for out in (folder / 'ledger.jsonl', folder / 'head.json', tmp_path / 'link'):
    assert 'give another file' in command_helpers.refusal(
        2, 'report', folder, '-o', out)
  assert before == {f: f.read_bytes() for f in before}


def test_a_figure_over_other_lines_than_its_id_says_is_not_of_the_study(folder):
  lines = ledger.read(folder)
  name = 'study/base/moved/8/kl_median'
  at = next(i for i, line in enumerate(lines) if line['kind'] == 'summary'
            and line['body']['id'] == name)
  for change in (
      {'field': 'max_abs'}, {'rule': 'max'},
      {'over': {'kind': 'compare', 'where': {'group.part': 'study'}}}):
    forged = copy.deepcopy(lines)
    forged[at]['body'] |= {'value': '0.0625', **change}
    page = Page(report.render_lines(forged))
    row, = [r for r in page.rows('Summary figures') if r[0] == name]
    assert row[1] == '0.0625'


def test_command(folder, source, tmp_path):
  out = tmp_path / 'out.html'
  done = cli_helpers.run('report', folder, '-o', out)
  assert done.rc == 0, done.stderr
  assert out.read_text(encoding='utf-8') == source
  lines = ledger.read(folder)
  assert done.json == {
      'out': str(out), 'bytes': len(source.encode()), 'lines': len(lines),
      'head': lines[-1]['hash'], 'verdicts': 7, 'verdicts_passed': 6}
  for args, message in (
      ((folder,), '--out is missing'),
      (('-o', out), '--run is missing'),
      ((tmp_path, '-o', out), 'there is no ledger.jsonl')):
    assert message in command_helpers.refusal(2, 'report', *args)
  assert 'No such file' in command_helpers.refusal(
      1, 'report', folder, '-o', tmp_path / 'no' / 'out.html')
  shown = command_helpers.call('report', '--help').stdout
  assert '\n  -o, --out=\n' in shown and shown.count('--out=') == 1


if _CHROMIUM:

  @pytest.mark.slow  # 10 s.
  def test_in_a_browser_a_phone_shows_the_whole_width(source, tmp_path):
    (tmp_path / 'page.html').write_text(source, encoding='utf-8')
    (tmp_path / 'phone.html').write_text('''<!DOCTYPE html><body>
<iframe id="f" src="page.html" style="width:360px;height:800px;border:0">
</iframe><script>
f.onload = () => {
  const d = f.contentDocument, cut = [];
  for (const t of d.querySelectorAll(
      'svg text, p, h1, h2, figcaption, pre code, .wide td, .wide th')) {
    const r = t.getBoundingClientRect();
    if (r.left < 0 || r.right > 360.5) cut.push(t.textContent);
  }
  const out = document.createElement('pre');
  out.id = 'found';
  out.textContent = JSON.stringify({
      width: d.documentElement.scrollWidth, cut: cut,
      plots: d.querySelectorAll('svg').length});
  document.body.append(out);
};
</script></body>''', encoding='utf-8')
    with tempfile.TemporaryDirectory() as profile:
      done = subprocess.run(
          [_CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu',
           '--disable-quic', '--no-first-run', '--disable-sync',
           '--disable-background-networking', '--disable-component-update',
           '--allow-file-access-from-files', '--virtual-time-budget=10000',
           '--window-size=500,900', f'--user-data-dir={profile}', '--dump-dom',
           f'file://{tmp_path}/phone.html'],
          capture_output=True, text=True, timeout=120, check=False)
    match = re.search('<pre id="found">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stderr[-2000:]
    found = json.loads(match.group(1))
    assert found['width'] <= 360 and not found['cut'] and found['plots'] == 10
