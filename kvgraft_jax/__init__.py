"""Deposit a model's KV state once; graft it anywhere, byte for byte.

In data-flow order: a model, a context computed from nothing, an artifact in a
store, a context grafted from it, and the checks that both are the same.
"""

import importlib
import typing

if typing.TYPE_CHECKING:
  from kvgraft_jax import nn as nn
  from kvgraft_jax.config import ModelConfig as ModelConfig
  from kvgraft_jax.context import Context as Context
  from kvgraft_jax.context import Score as Score
  from kvgraft_jax.corpora import Corpus as Corpus
  from kvgraft_jax.decode import Generation as Generation
  from kvgraft_jax.depositing import deposit as deposit
  from kvgraft_jax.engine import load_model as load_model
  from kvgraft_jax.engine import Model as Model
  from kvgraft_jax.errors import KvgraftError as KvgraftError
  from kvgraft_jax.grafting import Artifact as Artifact
  from kvgraft_jax.grafting import graft as graft
  from kvgraft_jax.library import Library as Library
  from kvgraft_jax.routing import Router as Router
  from kvgraft_jax.store import Store as Store
  from kvgraft_jax.streaming import Streaming as Streaming
  from kvgraft_jax.verification import audit as audit
  from kvgraft_jax.verification import AuditReport as AuditReport
  from kvgraft_jax.verification import verify as verify
  from kvgraft_jax.verification import VerifyReport as VerifyReport

__version__ = '0.1.0'

__all__ = [
    'Artifact', 'AuditReport', 'Context', 'Corpus', 'Generation',
    'KvgraftError', 'Library', 'Model', 'ModelConfig', 'Router', 'Score',
    'Store', 'Streaming', 'VerifyReport', 'audit', 'deposit', 'graft',
    'load_model', 'nn', 'verify',
]

# Public name -> its module, imported with the first use of the name: what
# needs no model must not wait for jax.
_HOMES = {
    'Artifact': 'grafting',
    'audit': 'verification',
    'AuditReport': 'verification',
    'Context': 'context',
    'Corpus': 'corpora',
    'deposit': 'depositing',
    'Generation': 'decode',
    'graft': 'grafting',
    'KvgraftError': 'errors',
    'Library': 'library',
    'load_model': 'engine',
    'Model': 'engine',
    'ModelConfig': 'config',
    'Router': 'routing',
    'Score': 'context',
    'Store': 'store',
    'Streaming': 'streaming',
    'verify': 'verification',
    'VerifyReport': 'verification',
    'nn': '',
}


if not typing.TYPE_CHECKING:  # Else no misspelt name would be an error.

  def __getattr__(name):
    if name not in _HOMES:
      raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    home = _HOMES[name]
    module = importlib.import_module(f'{__name__}.{home or name}')
    value = globals()[name] = getattr(module, name) if home else module
    return value

  def __dir__():
    return sorted({*globals(), *__all__})
