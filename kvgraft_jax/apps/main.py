"""The console script `kvgraft COMMAND --flags`."""

from collections.abc import Sequence
import difflib
import importlib
import sys

import kvgraft_jax
from kvgraft_jax.apps import cli

COMMANDS = {
    'demo': 'the whole story on the embedded model, in two processes',
    'deposit': 'compute a text once and store its KV state',
    'graft': 'continue from a stored artifact',
    'generate': 'continue a text without a store',
    'score': 'log-likelihood of a continuation',
    'verify': 'compare grafts with a fresh computation, byte for byte',
    'audit': 'recompute stored blocks from the blocks in front of them',
    'logits': 'write the logits of some positions to a file',
    'convert': 'write a checkpoint as safetensors or Orbax',
    'tokenize': 'text to token ids and back',
    'numerics': 'what fixes the bits here: profile, class, self-test',
    'plan': 'memory and storage that a model needs, without loading it',
    'flywheel': 'solve a dataset, keep what is verified, ask it again',
    'library': 'keep verified solutions: add, list, verify again, export',
    'corpus': 'many passages: deposit them, route a question to one, answer',
    'evidence': 'measure what is exact here and what is not, into a ledger',
    'ledger': 'check, register, repeat and compare recorded runs',
    'report': 'show a recorded run as one HTML page',
    'ls': 'list a store',
    'show': 'everything about one artifact',
}
WITH_ACTIONS = ('corpus', 'ledger', 'library')


def usage() -> str:
  """Returns the overview of all commands."""
  width = max(map(len, COMMANDS))
  lines = [f'  {name:{width}}  {what}' for name, what in COMMANDS.items()]
  return f'''\
Deposit a language model's KV state once; graft it anywhere, byte for byte.

usage: kvgraft COMMAND --flags

{chr(10).join(lines)}

kvgraft COMMAND --help shows its flags. The last line on stdout is one JSON
object. Exit code: 0 done; 1 a check failed or the world did; 2 wrong usage or
incompatible input.
'''


def main(argv: Sequence[str]) -> int:
  """Runs `kvgraft ARGV`; returns the exit code."""
  name = argv[0] if argv else ''
  if name in ('-h', '--help', 'help'):
    return cli.show(usage())
  if name == '--version':
    return cli.show(f'{kvgraft_jax.__version__}\n')
  if name in COMMANDS:
    return cli.execute(name, argv[1:])
  known: dict[str, str] = {}
  for command in WITH_ACTIONS:
    module = importlib.import_module(f'kvgraft_jax.apps.{command}')
    known |= dict.fromkeys(module.ACTIONS, f'{command} ')
  known |= dict.fromkeys(COMMANDS, '')
  close = difflib.get_close_matches(name, known, 1)
  hint = (f'did you mean `kvgraft {known[close[0]]}{close[0]}`?' if close
          else 'see `kvgraft --help`')
  found = f'there is no command {name!r}' if name else 'no command was given'
  cli.warn(f'kvgraft: {found}; {hint}')
  return 2


def run() -> None:
  """Runs the console script."""
  cli.open_streams()
  sys.exit(main(sys.argv[1:]))


if __name__ == '__main__':
  run()
