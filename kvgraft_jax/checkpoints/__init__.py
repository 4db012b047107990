"""Weights, configuration and tokenizer from the outside, in one form."""
