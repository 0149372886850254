"""Changes the golden `untied` to a model whose heads are wide enough for 4-bit keys and values."""

ONE_HEAD = ("num_attention_heads=1", "num_key_value_heads=1", "head_dim=32")
