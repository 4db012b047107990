r"""AIME 2025 with Gemma 4 31B, tuned, in bfloat16.

    kvgraft flywheel runs/aime2025 --config=configs/aime2025_gemma4_31b.py \
        --model=DIR --dataset=aime2025.jsonl

DIR is a Hugging Face or Orbax directory or a GGUF file of the tuned model. The
dataset is a JSONL file with `id` (2025-I-01 to 2025-II-15), `problem` and
`answer`, which you have to bring: the texts belong to the MAA. Verified
programs for all thirty come along; they are offered where the model solves
nothing, and verify what it solves without seeing an answer key. Without
`--programs` the key verifies, and only what the model solves is added.

Expected: 30 entries, `wrong_hits` 0, `grafts_equal` 60 (two rounds), exit code
0. How many the model solves by itself is what the run is to find out.
"""


def get_config() -> dict[str, object]:
  """Returns flag values; the command line wins."""
  return {'model': 'gemma4-31b', 'dtype': 'bfloat16', 'capacity': 32768,
          'dataset': 'aime2025.jsonl',
          'programs': 'configs/aime2025_programs.jsonl', 'style': 'chat',
          'budget': 26000, 'samples': 5, 'rounds': 2, 'answer_tokens': 64}
