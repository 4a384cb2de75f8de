"""Drop-ins for other libraries' training loops: each module adapts the library that it is named after.

`accelerate` and `transformers` (Hugging Face) and `lightning` are extras: `pip install "echelon[lightning]"`. Nothing
here is imported unless a program asks for it.
"""
