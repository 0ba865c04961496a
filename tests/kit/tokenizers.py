"""Small tokenizers of the kinds that served models have, trained on text that stays: counts of tokens hang on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

CHECKOUT = Path(__file__).resolve().parents[2]
SPECIAL = ["<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"]
# Like many a real template it trims the message, and puts a system prompt of its own before it.
TEMPLATE = (
    "{{ bos_token }}system\nYou are a helpful assistant.\n"
    "{% for message in messages %}<|{{ message['role'] }}|>\n{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def byte_level(vocabulary: int = 2048) -> Tokenizer:
    """Byte-level BPE, as GPT-2, Llama 3 and Qwen have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trained(tokenizer, trainers.BpeTrainer, vocabulary, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    return tokenizer


def metaspace() -> Tokenizer:
    """BPE over words marked with ▁, as Llama 2 and Mistral have it, which begins every text with <|bos|>."""
    tokenizer = Tokenizer(models.BPE(unk_token="<|eos|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    trained(tokenizer, trainers.BpeTrainer, 2048)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", tokenizer.token_to_id("<|bos|>"))]
    )
    return tokenizer


def word_piece() -> Tokenizer:
    """Whole words and ## pieces, as BERT has it."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<|eos|>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trained(tokenizer, trainers.WordPieceTrainer, 2048)
    return tokenizer


def single_bytes() -> Tokenizer:
    """Every byte a token: no word is one, so that texts are made of letters without spaces."""
    return byte_level(len(SPECIAL) + 256)


def trained(tokenizer: Tokenizer, trainer: Any, vocabulary: int, **more: Any) -> None:
    texts = [path.read_text(encoding="utf-8") for path in (CHECKOUT / "LICENSE", CHECKOUT / "servers" / "words.txt")]
    maker = trainer(vocab_size=vocabulary, special_tokens=SPECIAL, show_progress=False, **more)
    tokenizer.train_from_iterator(texts, maker)


KINDS = {"byte-level": byte_level, "metaspace": metaspace, "word-piece": word_piece, "bytes": single_bytes}


def write_model(folder: Path, kind: str = "byte-level", *, template: str | None = TEMPLATE) -> Path:
    """A folder with a tokenizer in the form that models are published in."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=KINDS[kind](), bos_token=SPECIAL[0], eos_token=SPECIAL[1])
    if template is not None:
        tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder
