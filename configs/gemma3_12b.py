r"""Gemma 3 12B from a checkpoint, in bfloat16.

    kvgraft deposit --config=configs/gemma3_12b.py --model=DIR \
        --store=/tmp/store --text_file=manual.txt --name=manual
    kvgraft verify --config=configs/gemma3_12b.py --model=DIR \
        --store=/tmp/store --artifact=manual --continuations=50

DIR is a Hugging Face or Orbax directory or a GGUF file; without the flag it is
./gemma3-12b. Expected of `verify`: `sha256_equal` 50,
`argmax_agree` 50, `max_kl` 0.0, `greedy_tokens_equal` 64, exit code 0.

Needs, as `kvgraft plan --model=gemma3-12b --context=32768` says on CPU:
  11,765,788,416 parameters, 23,533,108,224 bytes of weights;
  393,216 bytes of K and V a token: 327,680 sliding, 65,536 global;
  5,133,828,096 bytes of cache for 32,768 positions.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma3-12b', 'dtype': 'bfloat16', 'capacity': 32768}
