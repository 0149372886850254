/** Programs to copy: how other clients use this server. */
export interface Snippet {
  name: string;
  language: string;
  code: string;
}

/** Returns the snippets for a server at `origin`; `needsKey`: it lets in those with a key. */
export function snippets(origin: string, model: string, needsKey: boolean): Snippet[] {
  const key = needsKey ? "YOUR_KEY" : "none";
  const auth = needsKey ? ` -H 'authorization: Bearer YOUR_KEY'` : "";
  const body = JSON.stringify({ model, messages: [{ role: "user", content: "Why is the sky blue?" }] });
  const ask = `"role": "user", "content": "Why is the sky blue?"`;
  const env = needsKey ? "PENSTOCK_API_KEY=YOUR_KEY " : "";
  return [
    { name: "curl", language: "bash", code: `curl ${origin}/v1/chat/completions -H 'content-type: application/json'${auth} \\\n  -d '${body}'` },
    {
      name: "OpenAI SDK", language: "python",
      code: `from openai import OpenAI  # pip install openai

client = OpenAI(base_url="${origin}/v1", api_key="${key}")
answer = client.chat.completions.create(model="${model}", messages=[{${ask}}])
print(answer.choices[0].message.content)`,
    },
    {
      name: "Anthropic SDK", language: "python",
      code: `from anthropic import Anthropic  # pip install anthropic

client = Anthropic(base_url="${origin}", api_key="${key}")
answer = client.messages.create(model="${model}", max_tokens=512, messages=[{${ask}}])
print(answer.content[0].text)`,
    },
    {
      name: "Ollama", language: "python",
      code: `from ollama import Client  # pip install ollama

client = Client(host="${origin}"${needsKey ? `, headers={"Authorization": "Bearer ${key}"}` : ""})
answer = client.chat(model="${model}", messages=[{${ask}}])
print(answer.message.content)`,
    },
    {
      name: "Coding agents", language: "bash",
      code: ["claude", "codex", "opencode", "aider"].map(each => `${env}penstock launch ${each} --url ${origin}`).join("\n"),
    },
  ];
}
