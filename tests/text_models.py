"""Tokenizers of each kind, made in memory, and a model that says what a test wants it to say."""

import json

import numpy as np
from converter_files import write_pt
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("<unk>", "<s>", "</s>")


def byte_fallback(words=(), adds_bos=False):
    """SentencePiece BPE: U+2581 for a blank, and a token <0xNN> for each byte of a character that it does not have."""
    vocab = {text: number for number, text in enumerate((*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁"))}
    merges = {}
    for word in words:
        for end in range(1, len(word)):
            for text in (word[:end], word[end], word[:end + 1]):
                vocab.setdefault(text, len(vocab))
            merges[word[:end], word[end]] = None
    tokenizer = Tokenizer(models.BPE(vocab, list(merges), byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def byte_level(texts, size=600):
    """GPT-2's: a token is some bytes, not always of whole characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return tokenizer


def unigram(texts):
    """Unigram with Metaspace, as T5 and XLM-R have it: a character that it does not have is unknown."""
    pieces = {"▁": -2.0} | {character: -8.0 for text in texts for character in text.replace(" ", "▁")}
    pieces |= {"▁" + text[:2]: -5.0 for text in texts} | {text[-3:].replace(" ", "▁"): -5.0 for text in texts}
    tokenizer = Tokenizer(models.Unigram([("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *pieces.items()], 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def word_piece():
    """BERT's: a blank before each token that does not begin with ##, but the first."""
    words = ("[UNK]", "[CLS]", "[SEP]", "play", "##ing", "##ed", "don", "'", "t", ".", "well")
    tokenizer = Tokenizer(models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


def chain(folder, successors, size, **files):
    """A Hugging Face folder of a Mixtral of `size` tokens, in which successors[t] follows token t, else 2.

    files: {"tokenizer_config": dict, ...}, each written as its JSON.
    """
    hidden = -(-size // 16) * 16
    after = np.full(size, 2)
    after[list(successors)] = list(successors.values())
    head = np.zeros((size, hidden), np.float32)
    head[after, range(size)] = 1
    ones, name = np.ones(hidden, np.float32), "model.layers.0."
    arrays = {"model.embed_tokens.weight": np.eye(size, hidden, dtype=np.float32), "lm_head.weight": head,
              "model.norm.weight": ones, name + "input_layernorm.weight": ones,
              name + "post_attention_layernorm.weight": ones,
              name + "block_sparse_moe.gate.weight": np.zeros((2, hidden), np.float32)}
    shapes = {f"self_attn.{x}_proj": (16, hidden) for x in "qkv"} | {"self_attn.o_proj": (hidden, 16)}
    for expert in (f"block_sparse_moe.experts.{number}." for number in range(2)):
        shapes |= {expert + "w1": (8, hidden), expert + "w3": (8, hidden), expert + "w2": (hidden, 8)}
    arrays |= {f"{name}{matrix}.weight": np.zeros(shape, np.float32) for matrix, shape in shapes.items()}
    config = {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1, "hidden_size": hidden,
              "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
              "head_dim": 8, "vocab_size": size, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
              "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "sliding_window": None}
    folder.mkdir()
    write_pt(folder / "pytorch_model.bin", arrays)
    for file, values in {"config": config, **files}.items():
        (folder / f"{file}.json").write_text(values if isinstance(values, str) else json.dumps(values))
    return folder
