"""Measures a routed corpus in which facts are planted.

  python scripts/bench_corpus.py --text_dir=DIR --work=DIR
  python scripts/bench_corpus.py --quick      # tiny model, seconds

Facts with invented names and numbers are put at known depths into a copy of
the texts, and the copy is built as a corpus of passages; a run that was
interrupted goes on from what is in --work. Then, for each fact: does a router
find the passage that holds it; does the model give the number, by generation
and by likelihood against three other facts' numbers, behind the right passage,
behind the routed one, and without a passage; and are logits, tokens and
likelihoods behind the stored passage those of a fresh computation? Answers are
timed with about 10, 50 and 100 % of the corpus.

A table for people goes first; the last line on stdout is one JSON object.
Exits 1 if something is not exact, or is computed again.
"""

import argparse
from collections.abc import Sequence
import dataclasses
import json
import math
import os
import pathlib
import re
import statistics
import sys
import tempfile
import time
from typing import Any

import numpy as np

import kvgraft_jax
from kvgraft_jax import corpora
from kvgraft_jax import corpus as corpus_lib
from kvgraft_jax import corpus_building
from kvgraft_jax import corpus_routing
from kvgraft_jax import engine
from kvgraft_jax import errors
from kvgraft_jax import grafting
from kvgraft_jax import memory
from kvgraft_jax import numerics
from kvgraft_jax import passages as passages_lib
from kvgraft_jax import store as store_lib

QUICK = {'model': 'tiny:0', 'facts': 6, 'passage_tokens': 400, 'block': 32,
         'questions': 2, 'rounds': 1, 'verify_passages': 1,
         'verify_continuations': 2, 'max_new_tokens': 4}
TEXT = pathlib.Path(kvgraft_jax.__file__).parent / 'data' / 'document.txt'
SHARES = (10, 50, 100)  # Per cent.
OPTIONS = 4
NEAR = 2000  # Characters between a wanted place and a border.
# Must agree between a stored passage and a fresh computation.
EXACT = ('logits_sha256', 'token_ids', 'logprobs')

FRONTS = ('Alder', 'Brack', 'Calder', 'Dunn', 'Elver', 'Farn', 'Gorse',
          'Hazel', 'Inver', 'Kest', 'Larch', 'Merro', 'Nether', 'Orra', 'Pell',
          'Quarn', 'Rook', 'Sorrel', 'Thrush', 'Wether')
BACKS = ('combe', 'ford', 'garth', 'holt', 'mere', 'moor', 'stow', 'thorpe',
         'well', 'wick')


@dataclasses.dataclass(frozen=True)
class Fact:
  """A planted sentence.

  Attributes:
    name: invented, in none of the texts.
    code: five digits, likewise.
    options: the code, then those of three other facts.
    source: path of the document.
    depth: place in the document, from 0 to 1.
  """

  name: str
  code: str
  options: tuple[str, ...]
  source: str
  depth: float

  @property
  def lead(self) -> str:
    """How the answer begins."""
    return f' The access code of the {self.name} archive is'

  @property
  def sentence(self) -> str:
    """What is planted, a paragraph."""
    return f'{self.lead[1:]} {self.code}.'

  @property
  def question(self) -> str:
    """What is asked."""
    return f'What is the access code of the {self.name} archive?'


def log(text: str) -> None:
  """Prints what is being done."""
  print(f'{time.strftime("%H:%M:%S")} {text}', file=sys.stderr, flush=True)


class Pace:
  """Prints a line of progress every half a minute."""

  def __init__(self, what: str):
    self._what, self._last = what, 0.0

  def __call__(self, done: int, total: int) -> None:
    """Prints if it is time."""
    if done == total or time.monotonic() - self._last > 30:
      self._last = time.monotonic()
      log(f'{self._what}: {done:,} of {total:,}')


def quick_texts(folder: pathlib.Path) -> pathlib.Path:
  """Writes a small directory of texts."""
  parts = TEXT.read_text(encoding='utf-8').split('\n\n')
  folder.mkdir(parents=True, exist_ok=True)
  for i in range(6):
    (folder / f'part-{i}.md').write_text(
        f'# Part {i}\n\n' + '\n\n'.join(parts[i::6]) + '\n', encoding='utf-8')
  return folder


def draw(
    texts: dict[str, str], count: int, seed: int
) -> list[tuple[str, str]]:
  """Returns `count` names and codes that are in none of the texts."""
  rng = np.random.Generator(np.random.PCG64(seed))
  whole = '\n'.join(texts.values())
  folded = whole.casefold()
  names = [f + b for f in FRONTS for b in BACKS]
  names = [n for n in rng.permutation(names).tolist()
           if n.casefold() not in folded][:count]
  taken = set(re.findall(r'\d+', whole))
  codes = [c for c in map(str, rng.permutation(np.arange(10000, 100000)))
           if c not in taken][:count]
  if min(len(names), len(codes)) < count:
    raise errors.UsageError(
        f'--facts: expected at most {min(len(names), len(codes))} with these'
        f' texts, found {count}')
  return list(zip(names, codes))


def place(text: str, target: int) -> int:
  """Returns the start of a paragraph near `target`, or else of a line."""
  for border in (r'\n[ \t]*\n+(?=[ \t]*\S)', r'\n(?=[ \t]*\S)'):
    ends = [found.end() for found in re.finditer(border, text)]
    nearest = min(ends, key=lambda end: abs(end - target), default=len(text))
    if abs(nearest - target) <= NEAR:
      return nearest
  return len(text)


def plant(
    texts: dict[str, str], count: int, seed: int
) -> tuple[dict[str, str], list[Fact]]:
  """Puts facts into texts, evenly spread over all of their characters.

  A text with one fact has it at one of ten depths in turn, one with several
  has each in the middle of its part.

  Returns:
    The new texts, and the facts.
  """
  drawn = draw(texts, count, seed)
  paths, sizes = list(texts), [len(text) for text in texts.values()]
  ends = np.cumsum(sizes)
  spots = [(i + 0.5) / count * ends[-1] for i in range(count)]
  homes = [paths[int(np.searchsorted(ends, spot, 'right'))] for spot in spots]
  planted: dict[str, str] = dict(texts)
  facts = []
  for path in dict.fromkeys(homes):
    text = texts[path]
    own = [i for i, home in enumerate(homes) if home == path]
    depths = [(j + 0.5) / len(own) for j in range(len(own))]
    if len(own) == 1:
      depths = [(own[0] % 10 + 0.5) / 10]
    ats = [place(text, int(depth * len(text))) for depth in depths]
    for i, at in zip(own, ats):
      name, code = drawn[i]
      others = (drawn[(i + k * count // OPTIONS) % count][1]
                for k in range(1, OPTIONS))
      facts.append(Fact(name, code, (code, *others), path, at / len(text)))
    for at, fact in reversed([*zip(ats, facts[-len(own):])]):
      # At the end of a text there may be no blank line.
      front = '\n\n' if at == len(text) else ''
      planted[path] = (planted[path][:at] + f'{front}{fact.sentence}\n\n'
                       + planted[path][at:])
  return planted, facts


def write_texts(texts: dict[str, str], folder: pathlib.Path) -> None:
  """Makes a directory hold these texts and nothing else."""
  if folder.exists():
    there = {p.relative_to(folder).as_posix()
             for p in folder.rglob('*') if p.is_file()}
    if there - texts.keys():
      raise errors.UsageError(
          f'{folder}: holds {min(there - texts.keys())!r} of other texts;'
          ' choose another --work')
  for path, text in texts.items():
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    if not file.exists() or file.read_bytes() != text.encode():
      file.write_bytes(text.encode())


def build_all(
    model: engine.Model, store: store_lib.Store, work: pathlib.Path,
    texts: dict[str, str], args: argparse.Namespace,
) -> dict[int, dict[str, Any]]:
  """Builds the corpora of all shares; returns share -> report.

  The smaller ones take what the largest has deposited.
  """
  sizes = np.cumsum([len(texts[path]) for path in sorted(texts)])
  result = {}
  for share in sorted(SHARES, reverse=True):
    count = int(np.argmin(np.abs(sizes / sizes[-1] - share / 100))) + 1
    with corpora.Corpus(work / f'corpus-{share}', create=True) as corpus:
      report = corpus_lib.build(
          model, store, corpus, work / 'texts',
          passage_tokens=args.passage_tokens, block=args.block,
          limit_documents=count, progress=Pace(f'build {share} %'))
      stats = corpus.stats()
    result[share] = dataclasses.asdict(report) | {
        'share': share, 'shortest': stats['shortest'],
        'longest': stats['longest']}
  return result


def homes_of(
    corpus: corpora.Corpus, facts: Sequence[Fact]
) -> list[corpora.Passage]:
  """Returns the passage that holds each fact."""
  every = list(corpus.passages())
  found = []
  for fact in facts:
    own = [p for p in every if fact.sentence in p.text]
    if len(own) != 1 or own[0].source != fact.source:
      raise errors.DamageError(
          f'{fact.sentence!r} is in {[p.place for p in own]}, expected one'
          f' passage of {fact.source}; choose another --work')
    found += own
  return found


def behind(
    model: engine.Model, context: engine.Context, fact: Fact,
    max_new_tokens: int,
) -> dict[str, Any]:
  """Asks for a fact behind a context, which may be empty."""
  encode, decode = model.tokenizer.encode, model.tokenizer.decode
  context.extend(encode(
      corpus_lib.prompt(fact.question, fact.lead), add_bos=not context.length))
  sha256 = context.logits_sha256()
  computed = context.tokens_computed
  logprobs = [context.score(encode(f' {option}', add_bos=False)).logprob
              for option in fact.options]
  made, = context.generate(
      max_new_tokens,
      stop_when=lambda ids: corpus_lib.first_line(decode(ids))[1])
  text = corpus_lib.first_line(made.text)[0]
  return {
      'text': text, 'token_ids': made.token_ids, 'logprobs': logprobs,
      'logits_sha256': sha256, 'tokens_restored': context.tokens_restored,
      'tokens_computed': computed,
      'generated': re.search(rf'(?<!\d){fact.code}(?!\d)', text) is not None,
      'chosen': logprobs[0] > max(logprobs[1:]),
      'device_kv_bytes': context.usage().device_kv_bytes,
      'device_kv_source': context.usage().device_kv_source,
  }


def grafted(
    model: engine.Model, store: store_lib.Store, passage: corpora.Passage
) -> engine.Context:
  """Returns a passage's context, from the store."""
  return grafting.graft(
      model, store, corpus_building.manifest_of(store, passage), record=False)


def heading_of(
    corpus: corpora.Corpus, passage: corpora.Passage
) -> str:
  """Tells how a passage's own headings serve as an address."""
  router = corpus_routing.AddressRouter(corpus)
  kinds = set()
  for heading in passage.headings:
    try:
      found, = router.route(heading)
      if found.passage.id == passage.id:
        return 'right'
      kinds.add('wrong')  # It is an id, path or place as well.
    except errors.NotFoundError:
      kinds.add('not found')
    except errors.UsageError:
      kinds.add('several have it')
  return min(kinds, default='has none')


def examine(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    facts: Sequence[Fact], args: argparse.Namespace,
) -> list[dict[str, Any]]:
  """Routes, answers and recomputes every fact; one row each."""
  bm25 = corpus_lib.bm25(corpus)
  routers: dict[str, corpus_routing.Router] = {
      'bm25': bm25, 'model': corpus_lib.ModelRouter(model, store, bm25)}
  address = corpus_routing.AddressRouter(corpus)
  rows = []
  for number, (fact, home) in enumerate(zip(facts, homes_of(corpus, facts))):
    log(f'fact {number + 1} of {len(facts)}: {home.place}')
    row: dict[str, Any] = {
        'name': fact.name, 'code': fact.code, 'depth': fact.depth,
        'passage_depth': home.text.index(fact.sentence) / len(home.text),
        'address_right': address.route(home.id)[0].passage.id == home.id,
        'heading_as_address': heading_of(corpus, home), **home.about()}
    wanted = {home.id: home}
    for name, router in routers.items():
      began = time.perf_counter()
      found = router.route(fact.question, OPTIONS)
      seconds = time.perf_counter() - began
      ids = [one.passage.id for one in found]
      judged = router.judge(found)
      wanted |= {one.passage.id: one.passage for one in found[:1]}
      row[name] = {
          'passage': ids[0] if ids else None, 'right': ids[:1] == [home.id],
          'among_4': home.id in ids, 'quality': judged.quality,
          'margin': judged.margin, 'route_s': seconds}
    answers = {
        passage.id: behind(
            model, grafted(model, store, passage), fact, args.max_new_tokens)
        for passage in wanted.values()}
    row['right_passage'] = answers[home.id]
    for name in routers:
      row[name]['answer'] = answers.get(row[name]['passage'])
    row['bare'] = behind(
        model, engine.Context(model), fact, args.max_new_tokens)
    fresh = behind(
        model, model.prefill(
            model.tokenizer.encode(home.text, add_bos=True), record=False),
        fact, args.max_new_tokens)
    assert fresh['tokens_restored'] == 0
    row['fresh_tokens_computed'] = fresh['tokens_computed']
    row['exact'] = (
        all(fresh[what] == row['right_passage'][what] for what in EXACT)
        and row['right_passage']['tokens_restored'] == home.tokens
        and fresh['tokens_computed'] == (
            home.tokens + row['right_passage']['tokens_computed']))
    rows.append(row)
  return rows


def time_answers(
    model: engine.Model, store: store_lib.Store, corpus: corpora.Corpus,
    facts: Sequence[Fact], args: argparse.Namespace,
) -> dict[str, Any]:
  """Asks the same questions several times; returns medians."""
  began = time.perf_counter()
  corpus_lib.bm25(corpus).prepare()
  index_s = time.perf_counter() - began
  for fact in facts:
    corpus_lib.warm_up(model, corpus, fact.question, fact.lead)
  asked, totals, found = [], [], {}
  corpus_lib.ask(model, store, corpus, facts[0].question, lead=facts[0].lead,
                 max_new_tokens=args.max_new_tokens)
  for _ in range(args.rounds):
    for fact in facts:
      began = time.perf_counter()
      answer = corpus_lib.ask(
          model, store, corpus, fact.question, lead=fact.lead,
          max_new_tokens=args.max_new_tokens)
      totals.append(time.perf_counter() - began)
      asked.append(answer)
      assert answer.source is not None and answer.ordinal is not None
      found[fact.name] = corpus.at(answer.source, answer.ordinal), answer.text
  medians = {name: statistics.median(getattr(one, name) for one in asked)
             for name in ('route_s', 'graft_s', 'answer_s')}
  usages = [behind(model, grafted(model, store, found[fact.name][0]), fact, 1)
            for fact in facts]
  return medians | {
      'total_s': statistics.median(totals), 'index_s': index_s,
      'answers': len(asked), 'questions': len(facts),
      'right': sum(fact.sentence in found[fact.name][0].text
                   for fact in facts),
      'tokens_restored': statistics.median(
          one.tokens_restored for one in asked),
      'tokens_computed': statistics.median(
          one.tokens_computed for one in asked),
      'tokens_decoded': statistics.median(one.tokens_decoded for one in asked),
      'exact': all(one.exact for one in asked),
      'device_kv_bytes': max(one['device_kv_bytes'] for one in usages),
      'device_kv_source': usages[0]['device_kv_source'], 'given': {
          name: [passage.place, text]
          for name, (passage, text) in found.items()}}


def by_tenth(
    rows: Sequence[dict[str, Any]], what: str
) -> list[dict[str, int]]:
  """Counts answers behind the right passage, by tenths of a depth."""
  result = []
  for tenth in range(10):
    own = [r for r in rows if min(9, math.floor(10 * r[what])) == tenth]
    result.append({'facts': len(own)} | {
        how: sum(r['right_passage'][how] for r in own)
        for how in ('generated', 'chosen')})
  return result


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
  """Returns the counts over all facts."""
  def given(answers: list[dict[str, Any] | None]) -> dict[str, int]:
    return {how: sum(answer[how] for answer in answers if answer)
            for how in ('generated', 'chosen')}

  headings = [r['heading_as_address'] for r in rows]
  routers: dict[str, Any] = {'address': {
      'right': sum(r['address_right'] for r in rows),
      'headings': {kind: headings.count(kind) for kind in set(headings)}}}
  behind_right = [r['right_passage'] for r in rows]
  answers = {'right passage': given(behind_right),
             'no passage': given([r['bare'] for r in rows])}
  for name in ('bm25', 'model'):
    own = [r[name] for r in rows]
    routers[name] = {
        'right': sum(r['right'] for r in own),
        'among_4': sum(r['among_4'] for r in own),
        'median_s': statistics.median(r['route_s'] for r in own),
        'quality': {
            quality: [sum(r['right'] for r in those), len(those)]
            for quality in sorted({r['quality'] for r in own})
            for those in [[r for r in own if r['quality'] == quality]]}}
    answers[f'routed by {name}'] = given([one['answer'] for one in own])
  return {
      'facts': len(rows), 'routers': routers, 'answers': answers,
      'by_document_depth': by_tenth(rows, 'depth'),
      'by_passage_depth': by_tenth(rows, 'passage_depth'),
      'exact': sum(r['exact'] for r in rows),
      'tokens_restored': sum(one['tokens_restored'] for one in behind_right),
      'tokens_computed': sum(one['tokens_computed'] for one in behind_right),
      'fresh_tokens_computed': sum(r['fresh_tokens_computed'] for r in rows)}


def show(report: dict[str, Any]) -> None:
  """Prints the report for people."""
  found = report['summary']
  count = found['facts']
  built = report['corpora'][100]
  print(f'{built["tokens"]:,} tokens in {built["passages"]:,} passages of'
        f' {built["documents"]:,} documents, {memory.human(built["bytes"])}')
  for name, router in found['routers'].items():
    more = (f', own heading {router["headings"]}' if name == 'address' else
            f', among 4: {router["among_4"]}, right by quality'
            f' {router["quality"]}, {1000 * router["median_s"]:.1f} ms')
    print(f'router {name:>8}: right passage {router["right"]} of {count}{more}')
  for name, answer in found['answers'].items():
    print(f'answered, {name:>15}: {answer["generated"]} of {count} by'
          f' generation, {answer["chosen"]} by likelihood')
  for name in ('document', 'passage'):
    cells = [f'{row["generated"]}/{row["chosen"]}/{row["facts"]}'
             for row in found[f'by_{name}_depth']]
    print(f'by tenth of the {name} (generated/chosen/facts): '
          + ' '.join(cells))
  print(f'exact: {found["exact"]} of {count} passages;'
        f' {found["tokens_restored"]:,} tokens restored,'
        f' {found["tokens_computed"]:,} computed behind them, and'
        f' {found["fresh_tokens_computed"]:,} afresh')
  print(f'{"corpus":>7} {"tokens":>10} {"passages":>9} {"right":>6}'
        f' {"route":>8} {"graft":>8} {"answer":>8} {"total ms":>9}'
        f' {"index s":>8} {"device KV":>10}')
  for share, row in report['times'].items():
    cells = [1000 * row[name]
             for name in ('route_s', 'graft_s', 'answer_s', 'total_s')]
    print(f'{share:>5} % {report["corpora"][share]["tokens"]:>10,}'
          f' {report["corpora"][share]["passages"]:>9,}'
          f' {row["right"]:>2}/{row["questions"]:<2}'
          + ' '.join(f'{value:>{width}.1f}'
                     for value, width in zip(cells, (10, 8, 8, 9)))
          + f' {row["index_s"]:>8.2f}'
          f' {memory.human(row["device_kv_bytes"]):>10}')


def arguments() -> argparse.Namespace:
  """Parses the command line."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--text_dir', type=pathlib.Path,
                      help='directory with texts (see collect_texts.py)')
  parser.add_argument('--work', type=pathlib.Path, help='directory for texts,'
                      ' corpora and store; kept')
  parser.add_argument('--model', default='gemma3-270m')
  parser.add_argument('--dtype', default='bfloat16')
  parser.add_argument('--out', type=pathlib.Path, help='JSON file to write')
  parser.add_argument('--quick', action='store_true',
                      help='tiny model and small texts, for a test')
  parser.add_argument('--facts', type=int, default=100)
  parser.add_argument('--seed', type=int, default=0, help='of names and codes')
  parser.add_argument('--passage_tokens', type=int, default=4000)
  parser.add_argument('--block', type=int, default=128,
                      help='positions of a stored block')
  parser.add_argument('--max_new_tokens', type=int, default=12)
  parser.add_argument('--questions', type=int, default=20,
                      help='most questions that are timed')
  parser.add_argument('--rounds', type=int, default=3,
                      help='how often each is asked')
  parser.add_argument('--verify_passages', type=int, default=3,
                      help='passages that `corpus verify` compares as well')
  parser.add_argument('--verify_continuations', type=int, default=10)
  first, _ = parser.parse_known_args()
  if first.quick:
    parser.set_defaults(**QUICK)
  args = parser.parse_args()
  if not args.quick and not (args.text_dir and args.work):
    parser.error('expected --text_dir and --work, or --quick')
  for name, least in (
      ('facts', OPTIONS), ('questions', 1), ('rounds', 1),
      ('max_new_tokens', 1), ('verify_passages', 1),
      ('verify_continuations', 1)):
    if getattr(args, name) < least:
      parser.error(f'--{name}: expected at least {least}, found'
                   f' {getattr(args, name)}')
  return args


def run(args: argparse.Namespace, work: pathlib.Path) -> dict[str, Any]:
  """Plants, builds, examines and times; returns the report."""
  began, load = time.monotonic(), os.getloadavg()
  text_dir = args.text_dir or quick_texts(work / 'originals')
  # A text that was compressed is stored plain.
  texts = {re.sub(r'\.gz$', '.txt', d.path): d.text
           for d in passages_lib.documents(text_dir)}
  if not texts:
    raise errors.UsageError(f'--text_dir={text_dir}: there is no text')
  texts, facts = plant(texts, args.facts, args.seed)
  write_texts(texts, work / 'texts')
  model = engine.load_model(args.model, dtype=args.dtype)
  store = store_lib.Store(str(work / 'store'))
  report: dict[str, Any] = {
      'model': args.model, 'dtype': args.dtype,
      'profile': model.profile.fingerprint,
      'class': numerics.class_fingerprint(model.numerics_class),
      'environment': dict(model.profile.environment),
      'python': sys.version.split()[0], 'kvgraft_jax': kvgraft_jax.__version__,
      'passage_tokens': args.passage_tokens, 'block': args.block,
      'seed': args.seed, 'load_before': load,
  }

  def save() -> None:
    report['elapsed_s'] = time.monotonic() - began
    if args.out:
      args.out.write_text(
          json.dumps(report, sort_keys=True) + '\n', encoding='utf-8')

  report['corpora'] = build_all(model, store, work, texts, args)
  save()
  with corpora.Corpus(work / 'corpus-100') as corpus:
    corpus_lib.warm_up(model, corpus, facts[0].question, facts[0].lead)
    report['rows'] = examine(model, store, corpus, facts, args)
    report['summary'] = summary(report['rows'])
    save()
    log('corpus verify')
    report['verify'] = dataclasses.asdict(corpus_lib.verify(
        model, store, corpus, passages=args.verify_passages,
        n_continuations=args.verify_continuations,
        progress=Pace('verify')))
  save()
  with corpora.Corpus(work / f'corpus-{SHARES[0]}') as corpus:
    small = corpus.documents()
  timed = [f for f in facts if f.source in small][:args.questions]
  if not timed:
    raise errors.UsageError(
        f'--facts: none is in the first {SHARES[0]} % of the texts; plant more')
  report['times'] = {}
  for share in SHARES:
    log(f'answers with {share} % of the corpus')
    with corpora.Corpus(work / f'corpus-{share}') as corpus:
      report['times'][share] = time_answers(model, store, corpus, timed, args)
  exact = report['summary']['exact'] == len(facts) and all(
      row['exact'] for row in report['times'].values()) and (
          report['verify']['equal'] == report['verify']['passages'])
  report |= {
      'exact': exact,
      'nothing_computed_again': not any(
          report['corpora'][share]['tokens_computed'] for share in SHARES[:-1]),
      'flat': (report['times'][SHARES[-1]]['total_s']
               / report['times'][SHARES[0]]['total_s']),
      'load_after': os.getloadavg()}
  report['equal'] = exact and report['nothing_computed_again']
  save()
  return report


def main() -> int:
  """Runs everything; returns the exit code."""
  args = arguments()
  with tempfile.TemporaryDirectory(prefix='kvgraft-bench-') as folder:
    report = run(args, args.work or pathlib.Path(folder))
  show(report)
  print(json.dumps(report, sort_keys=True))
  return 0 if report['equal'] else 1


if __name__ == '__main__':
  try:
    sys.exit(main())
  except errors.KvgraftError as e:
    print(f'bench_corpus: {e}', file=sys.stderr)
    sys.exit(e.exit_code)
