"""Writes conversations as transformers renders them.

    python -m venv VENV
    VENV/bin/pip install transformers==5.24.0 jinja2==3.1.6
    VENV/bin/python scripts/make_chat_goldens.py [--out=FILE]

A developer's script, to be run after a change of a built-in template or of
`tests/testdata/chat`. Each conversation there is rendered by transformers'
`apply_chat_template` from each template's source: the built-in ones, and
`other.jinja`, which uses more of the engine. A golden is the text, or the
error where the template refuses the conversation.
"""

import argparse
import hashlib
import json
import pathlib
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHAT = ROOT / 'tests/testdata/chat'

# Template, from the root -> variables that it is rendered with.
TEMPLATES: dict[str, list[dict[str, bool]]] = {
    'kvgraft_jax/data/templates/gemma3.jinja': [{}],
    'kvgraft_jax/data/templates/gemma4.jinja': [
        {'enable_thinking': thinking, 'closed_thought': closed}
        for thinking in (False, True) for closed in (False, True)],
    'tests/testdata/chat/other.jinja': [
        {'enable_thinking': False}, {'enable_thinking': True}],
}


def tokenizer(template: str) -> Any:
  """Returns a tokenizer of transformers that has the special tokens' texts."""
  import tokenizers
  import transformers
  ids = {'<pad>': 0, '<eos>': 1, '<bos>': 2, '<unk>': 3}
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=tokenizers.Tokenizer(
          tokenizers.models.WordLevel(ids, unk_token='<unk>')),
      bos_token='<bos>', eos_token='<eos>', pad_token='<pad>',
      unk_token='<unk>', chat_template=template)


def render(
    renderer: Any, messages: list[dict], add_generation_prompt: bool,
    variables: dict[str, bool],
) -> dict[str, str]:
  """Returns {'text': ...}, or {'error': ...} as the template raises it."""
  import jinja2
  try:
    return {'text': renderer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=add_generation_prompt,
        **variables)}
  except jinja2.TemplateError as e:
    return {'error': str(e)}


def goldens() -> dict:
  """Returns the contents of the golden file."""
  import jinja2
  import transformers
  conversations = json.loads(
      (CHAT / 'conversations.json').read_text(encoding='utf-8'))
  found: dict[str, Any] = {
      'versions': {'transformers': transformers.__version__,
                   'jinja2': jinja2.__version__},
      'templates': {}}
  for path, modes in TEMPLATES.items():
    source = (ROOT / path).read_text(encoding='utf-8')
    renderer = tokenizer(source)
    found['templates'][path] = {
        'sha256': hashlib.sha256(source.encode('utf-8')).hexdigest(),
        'renderings': [
            {'conversation': name, 'add_generation_prompt': prompt,
             'variables': variables,
             **render(renderer, messages, prompt, variables)}
            for name, messages in conversations.items()
            for variables in modes
            for prompt in (False, True)]}
  return found


def main() -> None:
  """Writes the file."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default=CHAT / 'rendered.json',
                      type=pathlib.Path, help='the golden file')
  args = parser.parse_args()
  found = goldens()
  lines = []
  for path, entry in found['templates'].items():
    renderings = entry['renderings']
    refused = sorted({r['conversation'] for r in renderings if 'error' in r})
    print(f"{path}: {len(renderings)} renderings; refused: {refused}")
    head = json.dumps({'sha256': entry['sha256']})[1:-1]
    body = ',\n'.join('   ' + json.dumps(r) for r in renderings)
    lines.append(
        f'  {json.dumps(path)}: {{{head}, "renderings": [\n{body}\n  ]}}')
  args.out.write_text(
      f'{{"versions": {json.dumps(found["versions"])},\n "templates": {{\n'
      + ',\n'.join(lines) + '\n }}\n', encoding='utf-8')


if __name__ == '__main__':
  main()
