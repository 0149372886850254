// Streams an answer and makes an object with the Vercel AI SDK.
//
//   npm install ai @ai-sdk/openai-compatible zod
//   penstock serve
//   node examples/ai_sdk.mjs [URL]
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, Output, streamText } from "ai";
import { z } from "zod";

const url = process.argv[2] ?? "http://127.0.0.1:8000";
const penstock = createOpenAICompatible({ name: "penstock", baseURL: `${url}/v1`, supportsStructuredOutputs: true });
const model = penstock("smollm2");

const { textStream } = streamText({ model, prompt: "Why is the sky blue?", maxOutputTokens: 60 });
for await (const piece of textStream) process.stdout.write(piece);

const river = z.object({ name: z.string().max(30), kilometres: z.number().int() });
const prompt = "Name a long river and its length.";
const { output } = await generateText({ model, prompt, output: Output.object({ schema: river }), maxOutputTokens: 60 });
console.log("\n" + JSON.stringify(output));
