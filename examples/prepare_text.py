"""Makes a small Megatron data set from English text that every Python carries: its own reference manual.

    python examples/prepare_text.py DIR
    ... --tokenizer-type SentencePieceTokenizer --tokenizer-model DIR/tokenizer.model --data-path DIR/text

Writes DIR/text.bin and DIR/text.idx, one document per topic of ``pydoc_data.topics``, each ended by the
end-of-document token, and DIR/tokenizer.model, a SentencePiece vocabulary trained on the same text. The same
Python and sentencepiece make the same bytes.
"""

import argparse
import io
from pathlib import Path
from pydoc_data.topics import topics

import sentencepiece
import torch
from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder


def documents():
    """The topics' texts, in the order of their names."""
    return [topics[name] for name in sorted(topics)]


def train_tokenizer(texts, vocab_size):
    """A serialized SentencePiece model that keeps every character, line ends and indentation included."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=(line for text in texts for line in text.split("\n") if line),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        # A line end would otherwise be three bytes of fallback or, without it, unknown.
        user_defined_symbols=["\n"],
        byte_fallback=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        # More threads count pieces in another order.
        num_threads=1,
        minloglevel=1,
    )
    return model.getvalue()


def write_dataset(prefix, texts, tokenizer):
    """Writes ``prefix``.bin and .idx; returns the number of tokens."""
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=DType.optimal_dtype(tokenizer.get_piece_size()))
    total = 0
    for text in texts:
        tokens = [*tokenizer.encode(text), tokenizer.eos_id()]
        builder.add_item(torch.tensor(tokens, dtype=torch.int64))
        builder.end_document()
        total += len(tokens)
    builder.finalize(f"{prefix}.idx")
    return total


def main():
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("directory", type=Path, help="where the files go; made if missing")
    parser.add_argument("--vocab-size", type=int, default=1024, help="a multiple of 128 (default: 1024)")
    options = parser.parse_args()
    if options.vocab_size % 128 or options.vocab_size < 512:
        parser.error(f"--vocab-size {options.vocab_size}: use a multiple of 128, 512 or more")
    options.directory.mkdir(parents=True, exist_ok=True)
    texts = documents()
    model = train_tokenizer(texts, options.vocab_size)
    (options.directory / "tokenizer.model").write_bytes(model)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=model)
    total = write_dataset(options.directory / "text", texts, tokenizer)
    print(f"{len(texts)} documents, {total} tokens, vocabulary {options.vocab_size}: {options.directory}/text")


if __name__ == "__main__":
    main()
