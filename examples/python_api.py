"""Runs a model in this process, without a server: answers, a stream, structured output and embeddings.

python examples/python_api.py
"""

from __future__ import annotations

from penstock import LLM, SamplingParams, StructuredOutputsParams

with LLM("smollm2", max_len=1024) as llm:
    prompts = ["The capital of France is", "One, two, three,"]
    for output in llm.generate(prompts, SamplingParams(max_tokens=8, temperature=0)):
        print(f"{output.prompt} ->{output.text}")

    question = [{"role": "user", "content": "Why is the sky blue?"}]
    for piece in llm.stream(question, SamplingParams(max_tokens=40)):
        print(piece, end="", flush=True)
    print()

    choice = StructuredOutputsParams(choice=["good", "bad"])
    letter = [{"role": "user", "content": "Is this letter good or bad news? 'You have won!'"}]
    print(llm.chat(letter, SamplingParams(structured_outputs=choice, temperature=0))[0].text)

    cat, kitten, prices = (each.outputs.vector for each in llm.embed(["a cat", "a kitten", "prices fell"]))
    print(f"cat and kitten: {cat @ kitten:.3f}; cat and prices: {cat @ prices:.3f}")
