"""Conversations are rendered as transformers renders them."""

import hashlib
import json
import pathlib

import pytest

from kvgraft_jax import chat
from kvgraft_jax import errors

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHAT = ROOT / 'tests/testdata/chat'
GOLDENS = json.loads((CHAT / 'rendered.json').read_text(encoding='utf-8'))
CONVERSATIONS = json.loads(
    (CHAT / 'conversations.json').read_text(encoding='utf-8'))


@pytest.mark.parametrize('path', GOLDENS['templates'])
def test_goldens_are_of_the_present_files(path):
  golden = GOLDENS['templates'][path]
  source = (ROOT / path).read_bytes()
  again = 'run scripts/make_chat_goldens.py'
  assert hashlib.sha256(source).hexdigest() == golden['sha256'], again
  done = {r['conversation'] for r in golden['renderings']}
  assert done == set(CONVERSATIONS), again


@pytest.mark.parametrize('name', CONVERSATIONS)
@pytest.mark.parametrize('path', GOLDENS['templates'])
def test_a_conversation_is_rendered_as_by_transformers(path, name):
  source = (ROOT / path).read_text(encoding='utf-8')
  messages = chat.parse_messages(json.dumps(CONVERSATIONS[name]), 'messages')
  for golden in GOLDENS['templates'][path]['renderings']:
    if golden['conversation'] != name:
      continue
    variables = dict(golden['variables'])
    options = {
        'thinking': variables.pop('enable_thinking', False),
        'add_generation_prompt': golden['add_generation_prompt'],
        'bos': '<bos>', 'eos': '<eos>', **variables}
    if 'error' in golden:
      with pytest.raises(errors.UsageError) as caught:
        chat.render(source, messages, **options)
      assert golden['error'] in str(caught.value)
    else:
      assert chat.render(source, messages, **options) == golden['text'], golden
