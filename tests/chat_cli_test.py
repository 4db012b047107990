"""--messages on the command line: deposit, graft and generate."""

import json
import pathlib
import types

import pytest

import command_helpers
from command_helpers import ok
from command_helpers import refusal
from command_helpers import snapshot
from command_helpers import TINY
from kvgraft_jax.apps import common

SYSTEM = {'role': 'system', 'content': 'You know the tides of Port Ellery.'}
ASK = {'role': 'user', 'content': 'When is high water?'}
ANSWER = {'role': 'assistant', 'content': 'At noon, and \u00e9t\u00e9 at one.'}
MORE = {'role': 'user', 'content': [{'type': 'text', 'text': ' And low? '}]}
# What the built-in template makes of them; the byte tokenizer reads all of it,
# bos excepted, as plain bytes.
STORED = (
    '<start_of_turn>user\nYou know the tides of Port Ellery.\n\nWhen is high'
    ' water?<end_of_turn>\n')
TAIL = (
    '<start_of_turn>model\nAt noon, and \u00e9t\u00e9 at one.<end_of_turn>\n'
    '<start_of_turn>user\nAnd low?<end_of_turn>\n')
OPENING = '<start_of_turn>model\n'


@pytest.fixture(scope='module', autouse=True)
def models_fixture():
  with command_helpers.kept_models():
    yield


@pytest.fixture(scope='module', name='root')
def root_fixture(tmp_path_factory) -> pathlib.Path:
  return tmp_path_factory.mktemp('chat')


@pytest.fixture(scope='module', name='stored')
def stored_fixture(root):
  return ok('deposit', TINY, store(root), messages(root, SYSTEM, ASK),
            '--name=chat')


def store(root: pathlib.Path) -> str:
  return f'--store={root / "store"}'


def write(root: pathlib.Path, text: str) -> str:
  path = root / 'messages.json'
  path.write_text(text, encoding='utf-8')
  return f'--messages={path}'


def messages(root: pathlib.Path, *found: dict) -> str:
  return write(root, json.dumps(found))


def ids(text: str, bos: bool = True) -> list[int]:
  return [2] * bos + [4 + b for b in text.encode()]


def test_deposit_stores_the_conversation_so_far(root, stored):
  assert stored['tokens'] == stored['end'] == len(ids(STORED))
  assert (stored['messages'], stored['thinking']) == (2, False)
  same = root / 'ids.json'
  same.write_text(json.dumps(ids(STORED)))
  by_ids = ok('deposit', TINY, store(root), f'--tokens_file={same}')
  assert by_ids['artifact'] == stored['artifact'] and by_ids['existed']
  assert 'messages' not in by_ids


def test_graft_computes_only_what_is_new(root, stored):
  request = (TINY, store(root), '--artifact=chat', '--max_new_tokens=4',
             messages(root, SYSTEM, ASK, ANSWER, MORE))
  got = ok('graft', *request)
  fresh = ok('graft', *request, '--recompute')
  alone = ok('generate', TINY, request[-1], request[-2])
  assert got['tokens_restored'] == stored['tokens']
  assert got['tokens_computed'] == len(ids(TAIL + OPENING, bos=False))
  assert got['exact'] and not got['boundary_merges'] and got['messages'] == 4
  for other in (fresh, alone):
    assert other['tokens_restored'] == 0
    assert other['tokens_computed'] == len(ids(STORED + TAIL + OPENING))
    for key in ('logits_sha256', 'token_ids', 'messages', 'thinking'):
      assert other[key] == got[key], key


def test_a_graft_of_the_same_conversation_opens_the_answer(root, stored):
  got = ok('graft', TINY, store(root), '--artifact=chat', '--max_new_tokens=0',
           messages(root, SYSTEM, ASK))
  assert got['tokens_restored'] == stored['tokens']
  assert got['tokens_computed'] == len(OPENING)


def test_a_child_holds_what_the_conversation_adds(root, stored):
  child = ok('deposit', TINY, store(root), '--parent=chat', '--name=child',
             messages(root, SYSTEM, ASK, ANSWER, MORE))
  assert child['start'] == stored['end']
  assert child['tokens'] == child['tokens_computed'] == len(
      ids(TAIL, bos=False))
  got = ok('graft', TINY, store(root), '--artifact=child',
           '--max_new_tokens=0', messages(root, SYSTEM, ASK, ANSWER, MORE))
  assert got['tokens_computed'] == len(OPENING)


def test_a_kept_answer_is_grafted_as_far_as_it_is_shared(root, stored):
  request = (TINY, store(root), messages(root, SYSTEM, ASK))
  kept = ok('graft', *request, '--artifact=chat', '--max_new_tokens=3',
            '--deposit_as=kept')
  assert kept['deposited_as'] == 'kept'
  line = refusal(2, 'graft', *request, '--artifact=kept')
  length = len(ids(STORED + OPENING))
  assert f'--length={length} ' in line
  got = ok('graft', *request, '--artifact=kept', f'--length={length}',
           '--max_new_tokens=3')
  assert got['token_ids'] == kept['token_ids']
  assert got['logits_sha256'] == kept['logits_sha256']
  assert got['tokens_computed'] == 1  # Its last position alone.


def test_generate_says_which_template_was_used(root):
  result = command_helpers.call(
      'generate', TINY, messages(root, ASK), '--max_new_tokens=0')
  assert result.rc == 0
  assert 'tiny:0 has no chat template; used the built-in one of gemma3' in (
      result.stderr)


@pytest.mark.parametrize('command, flag, length_flag', [
    ('graft', '--artifact=chat', '--length'),
    ('deposit', '--parent=chat', '--parent_length'),
])
def test_another_conversation_is_refused_where_it_differs(
    root, stored, command, flag, length_flag
):
  before = snapshot(root / 'store')
  other = messages(root, SYSTEM, dict(ASK, content='When is low water?'))
  at = len(ids(STORED[:STORED.index('high')]))
  line = refusal(2, command, TINY, store(root), flag, other)
  assert (
      f'differs from the artifact at position {at} of {stored["tokens"]}:'
      " expected 'When is high wat', found 'When is low wate'") in line
  assert f'{length_flag}={at} to keep' in line
  assert snapshot(root / 'store') == before
  accepted = ok(command, TINY, store(root), flag, other, f'{length_flag}={at}')
  assert accepted['messages'] == 2


def test_a_shorter_conversation_is_no_graft(root, stored):
  ok('deposit', TINY, store(root), '--name=long',
     messages(root, SYSTEM, ASK, ANSWER, MORE))
  line = refusal(2, 'deposit', TINY, store(root), '--parent=long',
                 messages(root, SYSTEM, ASK))
  assert f'--parent_length={stored["tokens"]} to keep' in line
  result = command_helpers.call(
      'deposit', TINY, store(root), '--parent=chat',
      messages(root, SYSTEM, ASK))
  assert result.rc == 2 and result.stdout == ''
  assert 'the parent holds the whole conversation already' in (
      result.stderr.splitlines()[-1])


@pytest.mark.parametrize('text, message', [
    ('', 'found no JSON'),
    ('[{"role": "user"', 'found no JSON'),
    ('[' * 100_000, 'found no JSON'),
    ('[]', 'found an empty list'),
    ('{}', 'found dict'),
    ('"hello"', 'found str'),
    ('{"messages": []}', 'found an empty list'),
    ('{"messages": [{"role": "user", "content": ""}], "tools": []}',
     "found 'tools'; remove it"),
    ('["hello"]', 'message 0: expected an object with role and content'),
    ('[{"content": "x"}]', 'message 0: expected a role such as "user"'),
    ('[{"role": "", "content": "x"}]', 'a role such as "user", found none'),
    ('[{"role": 3, "content": "x"}]', 'a role such as "user", found int'),
    ('[{"role": "user"}]', 'content that is a string or a list of parts'),
    ('[{"role": "user", "content": null}]', 'found none'),
    ('[{"role": "user", "content": 7}]', 'found int'),
    ('[{"role": "user", "content": "x", "name": "y"}]',
     "found 'name'; remove it"),
    ('[{"role": "user", "content": ["x"]}]', 'parts that are objects'),
    ('[{"role": "user", "content": [{"type": "image", "url": "x"}]}]',
     "found 'image'; this is a text model"),
    ('[{"role": "user", "content": [{"type": "audio", "audio": "x"}]}]',
     "found 'audio'; this is a text model"),
    ('[{"role": "user", "content": [{"text": "x"}]}]',
     'expected parts of type "text", found None'),
    ('[{"role": "user", "content": [{"type": "text"}]}]',
     'a text in each part, found none'),
    ('[{"role": "user", "content": [{"type": "text", "text": "x", "a": 1}]}]',
     "found 'a'; remove it"),
    # What the template is asked.
    ('[{"role": "tool", "content": "x"}]', 'refuses the messages: roles must'),
    ('[{"role": "user", "content": "x"}, {"role": "user", "content": "y"}]',
     'expected model, found user at message 1'),
    ('[{"role": "system", "content": "x"}]', 'expected a user message'),
    # And the tokenizer and the model.
    ('[{"role": "user", "content": "\\ud800"}]', 'lone surrogate'),
    ('[{"role": "user", "content": "' + 'x' * 5000 + '"}]',
     'beyond the capacity of 4096'),
    ('[{"role": "user", "content": "' + 'x' * 2_000_000 + '"}]',
     'a text of 2,000,0'),
])
def test_bad_messages_are_refused(root, text, message):
  assert message in refusal(2, 'generate', TINY, write(root, text))


def test_flags_that_exclude_each_other(root):
  given = messages(root, ASK)
  (root / 'x').write_text('[1]')
  for flag in ('--prompt=x', f'--prompt_file={root / "x"}',
               f'--tokens_file={root / "x"}'):
    assert 'excludes other texts' in refusal(2, 'generate', TINY, given, flag)
  assert 'excludes other texts' in refusal(
      2, 'deposit', TINY, store(root), given, f'--text_file={root / "x"}')
  assert '--thinking needs --messages' in refusal(
      2, 'generate', TINY, '--prompt=x', '--thinking')
  for flag in ('--messages=', f'--messages={root}',
               f'--messages={root / "no.json"}'):
    assert 'expected a file that can be read' in refusal(
        2, 'generate', TINY, flag)
  (root / 'latin').write_bytes(b'["\xe9"]')
  assert 'not valid UTF-8 at byte 2' in refusal(
      2, 'generate', TINY, f'--messages={root / "latin"}')
  assert '--tokens_file or --messages' in refusal(2, 'generate', TINY)


@pytest.fixture(name='tiny')
def tiny_fixture():
  """The model that the commands of this module share."""
  return common.load_model(types.SimpleNamespace(
      model='tiny:0', dtype='bfloat16', chunk=None, tile=None, page=None,
      capacity=None, allow_beyond_trained=False, threads=None))


def test_a_model_without_a_tokenizer_takes_no_messages(root, tiny, monkeypatch):
  monkeypatch.setattr(tiny, 'tokenizer', None)
  assert 'takes token ids only' in refusal(
      2, 'generate', TINY, messages(root, ASK))


def test_the_models_own_template_comes_first(root, tiny, monkeypatch):
  monkeypatch.setattr(
      tiny, 'chat_template', '{{ bos_token }}{{ enable_thinking }} '
      "{{ messages[0]['content'] }}{{ eos_token }}", raising=False)
  result = command_helpers.call(
      'generate', TINY, messages(root, ASK), '--max_new_tokens=0', '--thinking')
  assert result.rc == 0 and result.stderr == ''
  assert result.json['thinking'] is True
  tiny.chat_template = '{{ bos_token }}the same'
  assert 'knows none; leave it out' in refusal(
      2, 'generate', TINY, messages(root, ASK), '--thinking')
  # The byte tokenizer reads eos as bytes too.
  assert result.json['prompt_tokens'] == len(
      ids(f'True {ASK["content"]}<eos>'))


@pytest.mark.parametrize('template, message', [
    ('{{ nothing.here }}', "UndefinedError: 'nothing' is undefined"),
    ('{% if %}', 'failed at line 1: TemplateSyntaxError: Expected an expr'),
    ('{{ bos_token }}{{ bos_token }}', 'a second bos (<bos>, id 2)'),
    ("{{ raise_exception('no\n  way') }}", 'refuses the messages: no way;'),
])
def test_a_bad_template_is_one_line(root, tiny, monkeypatch, template, message):
  monkeypatch.setattr(tiny, 'chat_template', template, raising=False)
  assert message in refusal(2, 'generate', TINY, messages(root, ASK))


def test_a_template_that_tells_the_time_is_pointed_out(root, tiny, monkeypatch):
  monkeypatch.setattr(
      tiny, 'chat_template',
      "{{ strftime_now('%Y') }} {{ strftime_now('%Y') }}", raising=False)
  result = command_helpers.call(
      'generate', TINY, messages(root, ASK), '--max_new_tokens=0')
  assert result.rc == 0
  assert result.json['prompt_tokens'] == len(ids('2026 2026'))
  assert result.stderr.count('writes the time into the prompt') == 1
