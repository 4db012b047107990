"""Writes golden logits of tiny random Gemma 3 and Gemma 4 models.

    python -m venv VENV
    VENV/bin/pip install torch==2.13.0 transformers==5.24.0 ml_dtypes
    export PYTHONPATH=tests
    VENV/bin/python scripts/make_oracle_goldens.py [--out=tests/testdata/oracle]
    VENV/bin/python scripts/make_oracle_goldens.py --check-directory

A developer's script: transformers is the independent implementation, and the
everyday tests read what it wrote. Every case is a small model with all features
of its size. Weights come from `tests/oracle_weights.py`; logits from float32
eager attention on CPU. A golden is written only if it can find mistakes: the
float64 logits agree to better than TOLERANCE, the sliding window changes the
logits, every tensor does, and no expert choice is nearly tied.

`outer_CASE.json` holds config and tensor names of the multimodal form of a
case, whose text logits are shown to be the case's own.

`--check-directory` writes nothing: it lets transformers save each case in both
dtypes and compares names, shapes and bytes with a directory that
`oracle_weights` builds from the golden file, then loads that directory.
"""

import argparse
import base64
from collections.abc import Iterator
import contextlib
import copy
import json
import pathlib
import re
import tempfile
from typing import Any
from unittest import mock

import numpy as np

import oracle_weights

TOLERANCE = 1e-4
VISIBLE = 1e-3  # What a change of window or of any tensor does to a logit.

SLIDING, FULL = 'sliding_attention', 'full_attention'
COMMON = {
    'vocab_size': 128, 'hidden_size': 32, 'intermediate_size': 64,
    'num_attention_heads': 4, 'num_key_value_heads': 2, 'head_dim': 16,
    'sliding_window': 4,
}
GEMMA4 = COMMON | {'global_head_dim': 32, 'final_logit_softcapping': 30.0}
WITHOUT_PLE = {'hidden_size_per_layer_input': 0,
               'vocab_size_per_layer_input': 128}
WITH_PLE = {'hidden_size_per_layer_input': 8, 'vocab_size_per_layer_input': 128}
LARGE = GEMMA4 | {'num_hidden_layers': 6, 'attention_k_eq_v': True,
                  'num_global_key_value_heads': 1,
                  'use_bidirectional_attention': 'vision'}
# Case -> (class name without ForCausalLM, arguments of its text config).
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    'gemma3-small': ('Gemma3', COMMON | {
        'num_hidden_layers': 6, 'query_pre_attn_scalar': 16}),
    'gemma3-linear': ('Gemma3', COMMON | {
        'num_hidden_layers': 6, 'query_pre_attn_scalar': 8,
        'rope_parameters': {
            SLIDING: {'rope_type': 'default', 'rope_theta': 1e4},
            FULL: {'rope_type': 'linear', 'factor': 8.0, 'rope_theta': 1e6}}}),
    'gemma4-e2b': ('Gemma4', GEMMA4 | WITH_PLE | {
        'num_hidden_layers': 8, 'layer_types': [SLIDING, FULL] * 4,
        'num_key_value_heads': 1, 'num_kv_shared_layers': 4,
        'use_double_wide_mlp': True}),
    'gemma4-e4b': ('Gemma4', GEMMA4 | WITH_PLE | {
        'num_hidden_layers': 9, 'layer_types': [SLIDING, SLIDING, FULL] * 3,
        'num_kv_shared_layers': 3}),
    'gemma4-12b': ('Gemma4Unified', LARGE),
    'gemma4-26b-a4b': ('Gemma4', LARGE | WITHOUT_PLE | {
        'enable_moe_block': True, 'num_experts': 8, 'top_k_experts': 2,
        'moe_intermediate_size': 16}),
    'gemma4-31b': ('Gemma4', LARGE | WITHOUT_PLE),
}

# First fit wins. Gemma 3 stores a norm's weight less one. A small q_norm keeps
# Gemma 4's unscaled scores small, and with them the noise of float32.
KINDS = {
    'Gemma3': [
        {'names': '*norm*.weight', 'uniform': [0, 0.5]},
        {'names': '*.embed_tokens.weight', 'uniform': [0, 1.5]},
        {'names': '*', 'uniform': [0, 0.375]},
    ],
    'Gemma4': [
        {'names': '*.q_norm.weight', 'uniform': [0.25, 0.125]},
        {'names': '*norm*.weight', 'uniform': [1, 0.5]},
        {'names': '*.layer_scalar', 'uniform': [1, 0.375]},
        {'names': '*.router.*scale', 'uniform': [1, 0.5]},
        {'names': '*.embed_tokens*.weight', 'uniform': [0, 1.5]},
        {'names': '*', 'uniform': [0, 0.375]},
    ],
}
# 1 for the others. Chosen for a wide routing margin and for little noise.
SEEDS = {'gemma4-26b-a4b': 5, 'gemma4-e2b': 4}
TOKENS = [
    [2, 17, 99, 4, 63, 127, 8, 17, 51, 110, 0, 76, 35],
    [2, 106, 106, 5, 88, 1, 29, 44, 120, 73, 12, 91, 6],
]

TINY_SIGLIP = {'hidden_size': 16, 'intermediate_size': 16,
               'num_hidden_layers': 1, 'num_attention_heads': 2,
               'image_size': 16, 'patch_size': 8, 'vision_use_head': False}
TINY_VISION = {'hidden_size': 16, 'intermediate_size': 16,
               'num_hidden_layers': 1, 'num_attention_heads': 2,
               'num_key_value_heads': 2, 'head_dim': 8, 'patch_size': 4,
               'position_embedding_size': 8}
TINY_AUDIO = {'hidden_size': 16, 'num_hidden_layers': 1,
              'num_attention_heads': 2, 'subsampling_conv_channels': [8, 4],
              'output_proj_dims': 16}
# Text case -> arguments of the towers.
OUTER: dict[str, dict[str, Any]] = {
    'gemma3-linear': {'vision_config': TINY_SIGLIP, 'mm_tokens_per_image': 4},
    'gemma4-e2b': {'vision_config': TINY_VISION, 'audio_config': TINY_AUDIO},
    'gemma4-12b': {
        'vision_config': {'patch_size': 2, 'pooling_kernel_size': 2,
                          'mm_embed_dim': 16, 'mm_posemb_size': 8,
                          'output_proj_dims': 16},
        'audio_config': {'audio_embed_dim': 16}},
    'gemma4-26b-a4b': {'vision_config': TINY_VISION, 'audio_config': None},
}


def build(family: str, arguments: dict, outer: dict | None = None) -> Any:
  """Returns transformers' model, in eager form, with weights of its own.

  Args:
    family: first part of the class names.
    arguments: of the text config.
    outer: arguments of the multimodal config; None for the text model.
  """
  import transformers

  def make(name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(transformers, family + name)(*args, **copy.deepcopy(kwargs))

  text = make('TextConfig', **arguments)
  text._attn_implementation = text._experts_implementation = 'eager'
  if outer is None:
    return make('ForCausalLM', text).eval()
  config = make('Config', text_config=text, **outer)
  config._attn_implementation = 'eager'
  return make('ForConditionalGeneration', config).eval()


def fill(model: Any, arrays: dict[str, np.ndarray]) -> None:
  """Copies `arrays` into the model: every tensor but the tied head, once."""
  import torch
  wanted = model.state_dict().keys() - {'lm_head.weight'}
  _require(wanted == arrays.keys(),
           f'names differ: {sorted(wanted ^ arrays.keys())}')
  model.load_state_dict(
      {k: torch.from_numpy(v.copy()) for k, v in arrays.items()}, strict=False)
  head, table = model.lm_head.weight, model.get_input_embeddings().weight
  _require(head.data_ptr() == table.data_ptr(), 'the head is not tied')


def run(model: Any) -> np.ndarray:
  """Returns the logits of TOKENS: [2, 13, 128] in the model's dtype."""
  import torch
  with torch.no_grad():
    return model(
        input_ids=torch.tensor(TOKENS), use_cache=False).logits.numpy()


@contextlib.contextmanager
def float64() -> Iterator[None]:
  """Lets transformers' explicit float32 parts run in float64."""
  import torch
  softmax = torch.nn.functional.softmax

  def wide(x: Any, dim: int, dtype: Any = None, **kwargs: Any) -> Any:
    del dtype
    return softmax(x, dim=dim, dtype=torch.float64, **kwargs)

  with mock.patch.object(torch.Tensor, 'float', torch.Tensor.double):
    with mock.patch.object(torch.nn.functional, 'softmax', wide):
      yield


def routing_margin(model: Any) -> float | None:
  """Returns the least gap between the last chosen expert and the next."""
  gaps: list[float] = []

  def note(module: Any, _: Any, output: Any) -> None:
    k = module.config.top_k_experts
    ordered = output[0].sort(dim=-1, descending=True).values
    gaps.append(float((ordered[:, k - 1] - ordered[:, k]).min()))

  routers = [m for n, m in model.named_modules() if n.endswith('.router')]
  hooks = [m.register_forward_hook(note) for m in routers]
  run(model)
  for hook in hooks:
    hook.remove()
  return min(gaps, default=None)


def unseen(model: Any, logits: np.ndarray) -> list[str]:
  """Returns the tensors whose change no logit shows."""
  import torch
  found = []
  for name, value in model.state_dict().items():
    kept = value.clone()
    # Reversed, since a factor is lost in the norm that follows.
    value.copy_(kept.flip(-1) if value.shape[-1] > 1 else kept * 1.5)
    if np.abs(run(model) - logits).max() <= VISIBLE:
      found.append(name)
    value.copy_(kept)
  _require(torch.equal(torch.from_numpy(run(model)), torch.from_numpy(logits)),
           'the weights were not put back')
  return found


def golden(case: str) -> dict:
  """Returns the contents of a case's golden file.

  `config_arguments` are what the config was made from and have the flat names
  of published files; `config` is config.json as transformers writes it.

  Raises:
    SystemExit: if the logits would not show mistakes clearly.
  """
  family, arguments = CASES[case]
  model = build(family, arguments)
  recipe = {
      'seed': f'oracle {SEEDS.get(case, 1)} {case}',
      'kinds': KINDS[family.removesuffix('Unified')],
      'tensors': saved(model)[1],
  }
  arrays = oracle_weights.tensors(recipe)
  fill(model, arrays)
  logits = run(model)
  margin = routing_margin(model)
  wide = build(family, arguments | {'sliding_window': 64})
  fill(wide, arrays)
  exact = build(family, arguments)
  fill(exact, arrays)
  with float64():
    difference = _distance(run(exact.double()), logits)
  window = _distance(run(wide), logits)
  _require(np.isfinite(logits).all(), f'{case}: logits are not finite')
  _require(difference < TOLERANCE, f'{case}: float64 differs by {difference}')
  _require(window > VISIBLE, f'{case}: the window changes only {window}')
  _require(margin is None or margin > TOLERANCE,
           f'{case}: experts are tied to {margin}; change the seed')
  # The final norm takes the last layer's factor out again.
  last = f"model.layers.{arguments['num_hidden_layers'] - 1}.layer_scalar"
  hidden = set(unseen(model, logits)) - {last}
  _require(not hidden, f'{case}: these tensors change nothing: {hidden}')
  print(f'{case}: float64 {difference:.1e}, window {window:.2f}, routing'
        f' margin {margin}, largest logit {np.abs(logits).max():.1f}')
  return {
      'case': case,
      'versions': versions(),
      'config_arguments': arguments,
      'config': saved(model)[0],
      'recipe': recipe,
      'weights_sha256': oracle_weights.sha256(arrays),
      'float64_difference': float(f'{difference:.2g}'),
      'routing_margin': margin and float(f'{margin:.2g}'),
      'tokens': TOKENS,
      'logits': [base64.b64encode(x.astype('<f4').tobytes()).decode('ascii')
                 for x in logits],
  }


def outer_golden(case: str, text: dict) -> dict:
  """Returns the contents of `outer_CASE.json`, for the golden file `text`."""
  family, arguments = CASES[case]
  model = build(family, arguments, OUTER[case])
  config, tensors = saved(model)
  prefix = next(p for p in ('model.language_model.', 'language_model.model.')
                if any(name.startswith(p) for name in tensors))
  result = {'text_case': case, 'versions': versions(), 'config': config,
            'text_prefix': prefix, 'tensors': tensors}
  inside = {'model.' + n.removeprefix(prefix): s for n, s in tensors.items()
            if n.startswith(prefix)}
  _require(inside == text['recipe']['tensors'], f'outer {case}: text differs')
  with tempfile.TemporaryDirectory() as folder:
    path = pathlib.Path(folder)
    oracle_weights.write_directory(
        path, config, oracle_weights.outer_tensors(result, text), 'float32')
    difference = _distance(run(loaded(path)), oracle_weights.logits(text))
  _require(difference < TOLERANCE / 10, f'outer {case}: off by {difference}')
  print(f'outer_{case}: text logits differ by {difference:.1e}')
  return result


def saved(model: Any) -> tuple[dict, dict[str, list[int]]]:
  """Returns (config.json, name -> shape) as `save_pretrained` writes them."""
  import safetensors
  with tempfile.TemporaryDirectory() as folder:
    model.save_pretrained(folder)
    config = json.loads((pathlib.Path(folder) / 'config.json').read_bytes())
    with safetensors.safe_open(f'{folder}/model.safetensors', 'np') as file:
      return config, {
          k: list(file.get_slice(k).get_shape()) for k in sorted(file.keys())}


def loaded(folder: pathlib.Path) -> Any:
  """Returns the float32 model that transformers reads from a directory."""
  import torch
  import transformers
  config = json.loads((folder / 'config.json').read_bytes())
  kind = getattr(transformers, config['architectures'][0])
  model, info = kind.from_pretrained(
      folder, dtype=torch.float32, attn_implementation='eager',
      output_loading_info=True)
  surprises = {k: v for k, v in info.items() if v}
  _require(not surprises, f'{folder}: transformers reports {surprises}')
  return model.eval()


def check_directory(case: str) -> None:
  """Compares transformers' directories of a case with rebuilt ones."""
  import torch
  text = oracle_weights.load(case)
  arrays = oracle_weights.tensors(text['recipe'])
  family, arguments = CASES[case]
  for dtype in ('float32', 'bfloat16'):
    with tempfile.TemporaryDirectory() as folder:
      own = pathlib.Path(folder, 'own')
      rebuilt = pathlib.Path(folder, 'rebuilt')
      model = build(family, arguments)
      fill(model, arrays)
      model.to(getattr(torch, dtype)).save_pretrained(own)
      oracle_weights.write_directory(rebuilt, text['config'], arrays, dtype)
      _require(_contents(own) == _contents(rebuilt), f'{case} {dtype} differs')
      difference = _distance(run(loaded(rebuilt)), oracle_weights.logits(text))
      _require(difference < TOLERANCE / 10, f'{case}: off by {difference}')
      print(f'{case} {dtype}: {len(arrays)} tensors and the config are equal;'
            f' loaded logits differ by {difference:.1e}')


def _contents(folder: pathlib.Path) -> dict:
  """Returns the config, and dtype, shape and bytes of each tensor."""
  import safetensors
  import torch
  result: dict[str, Any] = {
      'config.json': json.loads((folder / 'config.json').read_bytes())}
  with safetensors.safe_open(folder / 'model.safetensors', 'pt') as file:
    for name in file.keys():
      value = file.get_tensor(name)
      result[name] = (str(value.dtype), tuple(value.shape),
                      value.contiguous().view(torch.uint8).numpy().tobytes())
  return result


def versions() -> dict[str, str]:
  """Returns the versions of the tools that made a golden file."""
  import torch
  import transformers
  return {'torch': torch.__version__, 'transformers': transformers.__version__}


def _distance(a: np.ndarray, b: np.ndarray) -> float:
  return float(np.abs(a.astype(np.float64) - b).max())


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise SystemExit(message)


def _dump(path: pathlib.Path, value: dict) -> None:
  text = json.dumps(value, indent=1)
  # A list of numbers stays on one line.
  text = re.sub(r'\[\s+((?:[-\d.]+,?\s+)+)\]',
                lambda m: '[' + ' '.join(m[1].split()) + ']', text)
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(text + '\n', encoding='utf-8')


def main() -> None:
  """Writes or checks the files."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--out', default=oracle_weights.FOLDER,
                      type=pathlib.Path, help='folder of the golden files')
  parser.add_argument('--check-directory', action='store_true',
                      help='compare directories instead of writing goldens')
  args = parser.parse_args()
  import torch
  import transformers
  transformers.utils.logging.set_verbosity_error()
  transformers.utils.logging.disable_progress_bar()
  torch.set_num_threads(1)
  if args.check_directory:
    for case in CASES:
      check_directory(case)
    return
  for case in CASES:
    text = golden(case)
    _dump(args.out / f'{case}.json', text)
    if case in OUTER:
      _dump(args.out / f'outer_{case}.json', outer_golden(case, text))


if __name__ == '__main__':
  main()
