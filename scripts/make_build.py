"""Writes BUILD from the imports of the modules and tests.

  python scripts/make_build.py          # writes BUILD
  python scripts/make_build.py --check  # exits 1 if BUILD is out of date

Labels `@pypi//NAME` are the packages of pyproject.toml.
"""

import ast
from collections.abc import Iterator
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
PACKAGE = 'kvgraft_jax'

# Import name to distribution, where they differ.
_DISTRIBUTIONS = {'absl': 'absl_py'}

_HEAD = '''\
# Written by scripts/make_build.py from the imports; do not edit.

load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//:__subpackages__"])

licenses(["notice"])

exports_files(["LICENSE"])

filegroup(
    name = "sources",
    testonly = True,
    srcs = [
        "BUILD",
        "README.md",
        "pyproject.toml",
    ] + glob([
        "configs/**",
        "kvgraft_jax/**/*.py",
        "kvgraft_jax/data/**",
        "scripts/**",
        "tests/**/*.jinja",
        "tests/**/*.json",
        "tests/**/*.npz",
        "tests/*.py",
    ]),
)
'''


def modules(root: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns dotted name behind the package -> file; '__init__' at its top."""
  found = {}
  for path in sorted((root / PACKAGE).rglob('*.py')):
    parts = path.relative_to(root / PACKAGE).with_suffix('').parts
    found['.'.join(parts)] = path
  return found


def imports(path: pathlib.Path) -> Iterator[tuple[str, int, bool]]:
  """Yields each import of a file.

  Yields:
    (dotted name, line, whether it runs when the file is imported); a relative
    import keeps its leading dots.
  """
  tree = ast.parse(path.read_text(encoding='utf-8'), str(path))
  yield from _imports(tree, True)


def _imports(node: ast.AST, runs: bool) -> Iterator[tuple[str, int, bool]]:
  for child in ast.iter_child_nodes(node):
    if isinstance(child, ast.Import):
      for alias in child.names:
        yield alias.name, child.lineno, runs
    elif isinstance(child, ast.ImportFrom):
      base = '.' * child.level + (child.module or '')
      for alias in child.names:
        yield f'{base}.{alias.name}', child.lineno, runs
    else:
      inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
      yield from _imports(child, runs and not inside)


def resolve(name: str, known: dict[str, pathlib.Path]) -> str | None:
  """Returns the package's module that the dotted import `name` reads.

  Args:
    name: as `imports` yields it.
    known: the package's modules.

  Returns:
    A key of `known`; what `known` lacks if there is none; None if `name` is of
    another package.
  """
  parts = name.split('.')
  if parts[0] != PACKAGE:
    return None
  parts = parts[1:]
  # `from a.b import c` names the module a.b.c, or a name within a.b.
  for end in (len(parts), max(0, len(parts) - 1)):
    for candidate in (
        '.'.join(parts[:end]),
        '.'.join([*parts[:end], '__init__']),
    ):
      if candidate in known:
        return candidate
  return '.'.join(parts)


def _label(module: str) -> str:
  return PACKAGE if module == '__init__' else module.replace('.', '/')


def _dependencies(
    path: pathlib.Path,
    known: dict[str, pathlib.Path],
    helpers: set[str],
) -> list[str]:
  """Returns the sorted labels that a file imports, itself excepted."""
  labels = set()
  for name, _, _ in imports(path):
    top = name.split('.')[0]
    module = resolve(name, known)
    if module is not None:
      if known.get(module) != path:
        labels.add(f':{_label(module)}')
    elif top in helpers:
      if top != path.stem:
        labels.add(f':{top}')
    elif top and top not in sys.stdlib_module_names:
      labels.add(f'@pypi//{_DISTRIBUTIONS.get(top, top)}')
  return sorted(labels)


def _rule(kind: str, **attributes: object) -> str:
  lines = [f'{kind}(']
  for key, value in attributes.items():
    if isinstance(value, list):
      if len(value) < 2:
        text = '[' + ', '.join(f'"{v}"' for v in value) + ']'
      else:
        text = '[\n' + ''.join(f'        "{v}",\n' for v in value) + '    ]'
    elif isinstance(value, bool):
      text = str(value)
    else:
      text = f'"{value}"'
    if value != []:
      lines.append(f'    {key} = {text},')
  return '\n'.join([*lines, ')']) + '\n'


def render(root: pathlib.Path) -> str:
  """Returns the text of BUILD for the tree at `root`."""
  known = modules(root)
  tests = sorted((root / 'tests').glob('*.py'))
  scripts = {p.stem: p for p in sorted((root / 'scripts').glob('*.py'))}
  helpers = {p.stem: p for p in tests if not p.stem.endswith('_test')}
  importable = {*helpers, *scripts}
  rules = [_HEAD]
  for name, path in known.items():
    rules.append(
        _rule(
            'py_library',
            name=_label(name),
            srcs=[str(path.relative_to(root))],
            deps=_dependencies(path, known, set()),
        )
    )
  for name, path in {**scripts, **helpers}.items():
    rules.append(
        _rule(
            'py_library',
            name=name,
            testonly=True,
            srcs=[str(path.relative_to(root))],
            imports=[path.parent.name],
            deps=_dependencies(path, known, importable),
        )
    )
  for path in tests:
    if path.stem in helpers:
      continue
    source = str(path.relative_to(root))
    slow = 'mark.slow' in path.read_text(encoding='utf-8')
    shared = [f':{h}' for h in ('conftest', 'pytest_main') if h in helpers]
    deps = {*_dependencies(path, known, importable), *shared}
    rules.append(
        _rule(
            'py_test',
            name=path.stem,
            size='large' if slow else 'small',
            srcs=[source],
            main='tests/pytest_main.py',
            args=[f'$(location {source})'],
            data=[':sources'],
            deps=sorted(deps),
        )
    )
  return '\n'.join(rules)


def main(arguments: list[str]) -> int:
  """Writes or checks BUILD; returns the exit code."""
  path = ROOT / 'BUILD'
  text = render(ROOT)
  if arguments == ['--check']:
    if not path.exists() or path.read_text(encoding='utf-8') != text:
      print('BUILD is out of date; run python scripts/make_build.py')
      return 1
    return 0
  path.write_text(text, encoding='utf-8')
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
