"""The tokenizer beside a model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from weft.errors import UserError, first_line, runs_own_code
from weft.files import check_folder
from weft.hub import check_model_is_there


def load_tokenizer(path: str) -> PreTrainedTokenizerBase:
    """The tokenizer beside a model (a directory or hub id). Raises UserError where there is none that works."""
    from transformers import AutoTokenizer  # brings torch and half of transformers, which workers may do without

    check_folder(path)
    check_model_is_there(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # the tokenizers library raises plain ones
        if refusal := runs_own_code(path, error):
            raise refusal from error
        raise UserError(
            f"model.path: no tokenizer could be read from {path}: {first_line(error)}. It needs tokenizer.json and "
            "tokenizer_config.json beside config.json; copy them from the model you started from."
        ) from error
    # Given a config alone, transformers makes an empty tokenizer and says nothing.
    if len(tokenizer) <= len(tokenizer.get_added_vocab()):
        raise UserError(
            f"model.path: {path} holds no tokenizer. Copy tokenizer.json and tokenizer_config.json of the model you "
            "started from to it."
        )
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer
