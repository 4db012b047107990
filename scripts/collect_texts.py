"""Collects public English text of this machine, for benchmarks.

  python scripts/collect_texts.py --out=DIR --tokens=1000000

The text is what Debian packages bring with them: manuals, readme files and
licences first, then news, copyright files and, where still more is needed,
changelogs. DIR gets a .txt file a document, with a title in its first line,
and `texts.jsonl`: package, source path, file, tokens and SHA-256 of each, in
the order they were chosen. One machine's packages give the same files always.
"""

import argparse
import collections
from collections.abc import Iterator
import gzip
import hashlib
import json
import pathlib
import re
import sys
from typing import NamedTuple
import zlib

from kvgraft_jax.apps import common

ROOTS = '/usr/share/doc,/usr/share/common-licenses'
LIST = 'texts.jsonl'
# Source bytes of a document; shorter ones are mostly pointers to others.
SMALLEST, LARGEST = 1500, 1 << 20

# Kinds in the order they are wanted; the first that matches a name counts.
KINDS = (
    ('changelog', r'change|history|release[-_ ]?notes|authors|thanks|credits'),
    ('copyright', r'copyright'),
    ('news', r'news'),
    ('prose', r'readme|faq|todo|bugs|copying|licen[cs]e|.*\.(md|txt|rst)$'
              r'|[A-Za-z0-9-]+(-\d(\.\d)?)?$'),
)
ORDER = 'prose', 'news', 'copyright', 'changelog'
_COMMON = frozenset(
    'a an and are as be by can for from has have if in is it may not of on or'
    ' that the this to was which will with you'.split())


class Text(NamedTuple):
  """One document.

  Attributes:
    kind: one of ORDER.
    package: that it comes from.
    path: of the source.
    name: path inside the package, without '.gz'.
    text: with the title in its first line.
    sha256: of the text.
  """

  kind: str
  package: str
  path: pathlib.Path
  name: str
  text: str
  sha256: str


def kind_of(name: str) -> str | None:
  """Returns the kind of a file, None for one that is not wanted."""
  for kind, pattern in KINDS:
    if re.match(pattern, name.lower()):
      return kind
  return None


def read(path: pathlib.Path) -> str | None:
  """Returns a file's text in plain form, None if it is no readable text."""
  try:
    data = path.read_bytes()
    if path.suffix == '.gz':
      data = gzip.decompress(data)
    text = data.decode('utf-8')
  except (OSError, EOFError, zlib.error, UnicodeDecodeError):
    return None
  if not SMALLEST <= len(data) <= LARGEST or '\0' in text:
    return None
  lines = [line.rstrip() for line in re.split(r'\r\n|[\n\r\f]', text)]
  return re.sub(r'\n{3,}', '\n\n', '\n'.join(lines)).strip('\n') + '\n'


def is_prose(text: str) -> bool:
  """Returns whether `text` reads like English sentences."""
  if text.lstrip().startswith(('<', '#!')):  # Markup and scripts.
    return False
  words = re.findall(r'[A-Za-z]+', text.lower())
  known = sum(word in _COMMON for word in words)
  letters = sum(map(len, words))
  return (text.isascii() or len(text.encode()) < 1.02 * len(text)) and (
      known > 0.2 * len(words) and letters > 0.6 * len(''.join(text.split())))


def titled(text: str, title: str) -> str:
  """Returns `text`, with `title` in front if it begins with none."""
  first, _, rest = text.partition('\n')
  second = rest.partition('\n')[0]
  if (first.startswith('# ') or len(first) <= 80 and first.strip('=-*# ')
      and not second.strip('=- ')
      and not re.search('copyright|://', first.lower())):
    return text
  return f'{title}\n\n{text}'


def candidates(roots: list[pathlib.Path]) -> Iterator[Text]:
  """Yields every document below `roots` that is worth having, once each."""
  seen = set()
  for root in roots:
    for path in sorted(root.rglob('*')):
      if path.is_symlink() or not path.is_file():
        continue
      inside = path.relative_to(root)
      name = re.sub(r'\.gz$', '', inside.name)
      kind = kind_of(name)
      text = kind and read(path)
      if not kind or not text or not is_prose(text):
        continue
      content = hashlib.sha256(''.join(text.split()).encode()).digest()
      if content in seen:
        continue
      seen.add(content)
      package = inside.parts[0] if len(inside.parts) > 1 else root.name
      text = titled(text, f'{name} of {package}')
      digest = hashlib.sha256(text.encode()).hexdigest()
      below = pathlib.Path(*inside.parts[1:-1], name)
      yield Text(kind, package, path, str(below), text, digest)


def in_order(texts: list[Text]) -> list[Text]:
  """Returns `texts` by kind, and the packages of a kind in turns."""
  turn = collections.Counter[tuple[str, str]]()
  keys = {}
  for text in sorted(texts, key=lambda t: t.sha256):
    key = text.kind, text.package
    keys[text] = ORDER.index(text.kind), turn[key], text.sha256
    turn[key] += 1
  return sorted(texts, key=keys.__getitem__)


def main() -> int:
  """Runs the script; returns its exit code."""
  parser = argparse.ArgumentParser(
      description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument('--out', required=True, type=pathlib.Path,
                      help='new or empty directory')
  parser.add_argument('--tokens', required=True, type=int,
                      help='about so many in all, at most 1 %% more')
  parser.add_argument('--model', default='gemma3-270m',
                      help='whose tokenizer counts')
  parser.add_argument('--roots', default=ROOTS,
                      help=f'directories, commas between; {ROOTS}')
  args = parser.parse_args()
  roots = [pathlib.Path(root) for root in args.roots.split(',')]
  missing = [str(root) for root in roots if not root.is_dir()]
  if missing:
    parser.error(f'--roots: no such directory: {", ".join(missing)}')
  if args.tokens < 1:
    parser.error(f'--tokens: expected at least 1, found {args.tokens}')
  if args.out.exists() and any(args.out.iterdir()):
    parser.error(f'--out={args.out}: expected a new or empty directory')
  tokenizer = common.load_tokenizer(args.model)
  args.out.mkdir(parents=True, exist_ok=True)
  rows, total, kinds = [], 0, collections.Counter[str]()
  for text in in_order(list(candidates(roots))):
    count = len(tokenizer.encode(text.text, add_bos=False))
    if total + count > 1.01 * args.tokens:
      continue
    name = re.sub(r'[^A-Za-z0-9._+-]+', '-', text.name).removesuffix('.txt')
    file = args.out / text.package / f'{name}.txt'
    if file.exists():  # 'a' and 'a.txt'.
      file = file.with_name(f'{name}-{len(rows)}.txt')
    file.parent.mkdir(exist_ok=True)
    file.write_text(text.text, encoding='utf-8', newline='\n')
    rows.append({
        'package': text.package, 'path': str(text.path), 'kind': text.kind,
        'file': str(file.relative_to(args.out)), 'tokens': count,
        'sha256': text.sha256})
    total += count
    kinds[text.kind] += count
    if total >= args.tokens:
      break
  (args.out / LIST).write_text(
      ''.join(json.dumps(row) + '\n' for row in rows), encoding='utf-8')
  print(json.dumps({
      'texts': len(rows), 'packages': len({row['package'] for row in rows}),
      'tokens': total, 'tokens_by_kind': kinds,
      'sha256': hashlib.sha256((args.out / LIST).read_bytes()).hexdigest()}))
  if total < args.tokens:
    print(f'collect_texts: expected {args.tokens} tokens, found {total} in'
          f' {args.roots}; install more packages with documentation, or lower'
          ' --tokens', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
