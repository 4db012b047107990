"""Modules import downwards only, and BUILD says what they import."""

import ast
import pathlib
import sys

import pytest

import make_build

ROOT = make_build.ROOT

# Within a tier a module may import those to its left. `apps.*` and
# `checkpoints.*` stand for the modules there, `__init__` included.
TIERS = (
    ('errors', 'hashing', 'paths', 'recheck', 'sandbox_child'),
    ('config', 'chat', 'tokenizer', 'rope', 'numerics', 'memory',
     'answers', 'sandbox', 'statements', 'parameters', 'database'),
    ('cache', 'layers', 'experts', 'attention'),
    ('model', 'reference', 'sharding', 'checkpoints.*', 'nn', 'artifact',
     'ledger', 'findings_flywheel', 'findings', 'results', 'registration',
     'resources', 'checkers', 'datasets', 'records', 'entry_checks',
     'library', 'routing', 'passages', 'corpora', 'corpus_routing'),
    ('kvstore', 'attempts', 'blocks', 'journal', 'writer', 'store',
     'sampling', 'programs', 'recorder', 'interrupts', 'cold', 'ring',
     'segments', 'streaming', 'selftest', 'speculation', 'decode',
     'context', 'engine'),
    ('grafting', 'depositing', 'verification', 'measure', 'plan', 'study',
     'schedules', 'entries', 'evidence_parts', 'evidence', 'prompts', 'gate',
     'ladder', 'flywheel_work', 'flywheel_solve', 'flywheel_ask',
     'flywheel_totals',
     'flywheel', 'run_stores', 'divergence', 'replay', 'report_page',
     'report_plots', 'report_setup', 'report_study', 'report_verdicts',
     'report_flywheel',
     'report', 'paging', 'corpus_building', 'corpus'),
    ('testing', '__init__'),
    ('apps.*',),
)

# Neither these nor what they import may import jax.
WITHOUT_JAX = (
    'errors', 'hashing', 'paths', 'artifact', 'recheck', 'ledger',
    'findings', 'registration', 'report', 'checkers', 'datasets', 'routing',
    'corpus_routing')
JAX = ('jax', 'jaxlib', 'flax')

# What may be imported at the top of a module; all else where it is used.
CORE = ('absl', 'blake3', 'flax', 'jax', 'jaxlib', 'ml_dtypes', 'numpy',
        'tensorstore')


def _place(module: str) -> tuple[int, int] | None:
  """Returns (tier, place from the left) of a module."""
  head = module.split('.')[0]
  for tier, names in enumerate(TIERS):
    for place, name in enumerate(names):
      if name == module or ('.' in name and name == f'{head}.*'):
        return tier, place
  return None


def _may_import(module: str, other: str) -> bool:
  here, there = _place(module), _place(other)
  if here is None or there is None:
    return True  # Reported as unknown.
  if here[0] == there[0] and here[1] == there[1]:
    return module != other  # Both of one folder; cycles are found apart.
  return there < here


def _graph(root: pathlib.Path) -> dict[str, dict[str, int]]:
  """Returns module -> module that it imports -> line."""
  known = make_build.modules(root)
  graph: dict[str, dict[str, int]] = {}
  for module, path in known.items():
    graph[module] = {}
    for name, line, _ in make_build.imports(path):
      other = make_build.resolve(name, known)
      if other is not None:
        graph[module].setdefault(other, line)
  return graph


def _closure(graph: dict[str, dict[str, int]], module: str) -> set[str]:
  """Returns all modules that `module` imports, directly or not."""
  seen: set[str] = set()
  todo = [module]
  while todo:
    for other in graph.get(todo.pop(), ()):
      if other not in seen:
        seen.add(other)
        todo.append(other)
  return seen


def problems(root: pathlib.Path) -> list[str]:
  """Returns one line for each broken rule in the package at `root`."""
  known = make_build.modules(root)
  graph = _graph(root)
  found = []
  for module, path in known.items():
    if _place(module) is None:
      found.append(f'{module}: has no place in TIERS')
    for other, line in graph[module].items():
      if other not in known:
        found.append(f'{module}:{line}: {other} does not exist')
      elif not _may_import(module, other):
        found.append(f'{module}:{line}: may not import {other}')
    if module in _closure(graph, module):
      found.append(f'{module}: imports itself in a circle')
    found.extend(_outside(module, path))
  for module in WITHOUT_JAX:
    if module in known:
      for other in sorted({module, *_closure(graph, module)} & set(known)):
        for name, line, _ in make_build.imports(known[other]):
          if name.split('.')[0] in JAX:
            found.append(f'{other}:{line}: {module} may not reach {name}')
  return found


def _outside(module: str, path: pathlib.Path) -> list[str]:
  """Returns broken rules about packages other than this one."""
  found = []
  for name, line, runs in make_build.imports(path):
    top = name.split('.')[0]
    where = f'{module}:{line}:'
    if not top:
      found.append(f'{where} relative import {name}')
    elif top == 'tensorstore' and module not in (
        'kvstore', 'checkpoints.orbax_arrays'
    ):
      found.append(f'{where} only kvstore imports tensorstore')
    elif top == 'absl' and 'flags' in name and not module.startswith('apps.'):
      found.append(f'{where} only apps import absl.flags')
    elif name.startswith('flax.nnx'):
      found.append(f'{where} nothing imports flax.nnx')
    elif runs and top not in (
        *CORE, make_build.PACKAGE, *sys.stdlib_module_names
    ):
      found.append(f'{where} {top} is imported where it is used, not on top')
  return found


def test_the_package_keeps_the_rules():
  assert problems(ROOT) == []


@pytest.mark.parametrize(
    'module, source, problem',
    [
        ('errors', 'from kvgraft_jax import store', 'may not import store'),
        ('config', 'import kvgraft_jax.engine', 'may not import engine'),
        ('config', 'from kvgraft_jax import rope', 'may not import rope'),
        ('grafting', 'from kvgraft_jax import verification',
         'may not import verification'),
        ('grafting', 'def f():\n  from kvgraft_jax import verification',
         'may not import verification'),
        ('store', 'from kvgraft_jax import Store', 'may not import __init__'),
        ('store', 'from kvgraft_jax import apps', 'may not import apps'),
        ('store', 'from .errors import DamageError', 'relative import'),
        ('config', 'import jax\nimport optax', 'imported where it is used'),
        ('surprise', 'import os', 'has no place in TIERS'),
        ('apps.three', 'from kvgraft_jax.gone import x', 'gone.x does not'),
        ('hashing', 'import jax', 'hashing may not reach jax'),
        ('artifact', 'def f():\n  from jax import numpy', 'may not reach jax'),
        ('ledger', 'from kvgraft_jax import cache', 'ledger may not reach jax'),
        ('grafting', 'import tensorstore as ts',
         'only kvstore imports tensor'),
        ('grafting', 'from absl import flags', 'only apps import absl.flags'),
        ('nn', 'from flax import nnx', 'nothing imports flax.nnx'),
        ('apps.one', 'from flax.nnx import bridge', 'nothing imports flax.nnx'),
        ('apps.one', 'from kvgraft_jax.apps import two', 'in a circle'),
    ],
)
def test_a_broken_rule_is_found(tmp_path, module, source, problem):
  tree = {
      '__init__': 'from kvgraft_jax import engine',
      'apps.__init__': '',
      'apps.two': 'from absl import flags\nfrom kvgraft_jax.apps import one',
      'apps.one': 'from kvgraft_jax import engine',
      'cache': 'import jax',
      'config': 'import dataclasses',
      'engine': 'import numpy as np\nfrom kvgraft_jax import store',
      'errors': '',
      'rope': 'from kvgraft_jax import config',
      'kvstore': 'import tensorstore',
      'store': 'from kvgraft_jax.errors import DamageError',
      'verification': 'def f():\n  import optax',
  }

  def write(name, text):
    path = tmp_path / make_build.PACKAGE / (name.replace('.', '/') + '.py')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

  for name, text in tree.items():
    write(name, text)
  assert problems(tmp_path) == []
  write(module, source)
  found = problems(tmp_path)
  assert any(problem in line for line in found), found


def test_build_is_what_the_generator_writes():
  written = (ROOT / 'BUILD').read_text(encoding='utf-8')
  assert written == make_build.render(ROOT), (
      'run python scripts/make_build.py'
  )


def test_build_names_each_module_and_test():
  calls: dict[str, list[dict]] = {}
  for node in ast.parse((ROOT / 'BUILD').read_text(encoding='utf-8')).body:
    assert isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    assert isinstance(node.value.func, ast.Name)
    calls.setdefault(node.value.func.id, []).append(
        {k.arg: k.value for k in node.value.keywords}
    )
  sources = {}
  for rule in calls['py_library'] + calls['py_test']:
    deps = ast.literal_eval(rule['deps']) if 'deps' in rule else []
    sources[ast.literal_eval(rule['srcs'])[0]] = deps
  expected = [*(ROOT / 'kvgraft_jax').rglob('*.py'),
              *(ROOT / 'tests').glob('*.py')]
  for path in expected:
    assert str(path.relative_to(ROOT)) in sources
  assert all(deps == sorted(set(deps)) for deps in sources.values())
  assert 'licenses' in calls and 'package' in calls
