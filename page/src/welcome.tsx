/** The first screen: examples to try, and how other clients use this server. */
import { useState } from "preact/hooks";
import { send } from "./composer";
import { Code } from "./markdown";
import { snippets } from "./snippets";
import { state } from "./state";
import { loadKey } from "./storage";

const EXAMPLES = [
  ["Explain", "Why is the sky blue? Answer in two sentences."],
  ["Write code", "Write a Python function that returns the n-th Fibonacci number, with a docstring."],
  ["Make a table", "Make a table of three planets with their diameter and the length of their day."],
  ["Rewrite", "Make this friendlier: \"Send me the report by Monday or the deal is off.\""],
] as const;

export function Welcome() {
  const all = snippets(new URL(".", location.href).href.replace(/\/$/, ""), state.model || "MODEL", !!loadKey() || !!state.keyWanted);
  const [chosen, setChosen] = useState(0);
  const move = (event: KeyboardEvent) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    const next = (chosen + by + all.length) % all.length;
    setChosen(next);
    document.getElementById(`tab-${next}`)?.focus();
  };
  const snippet = all[chosen]!;
  return (
    <div class="welcome">
      <h2 class="greeting">What would you like to know?</h2>
      <div class="examples">
        {EXAMPLES.map(([name, text]) => (
          <button type="button" class="example" onClick={() => send(text)}><strong>{name}</strong><span>{text}</span></button>
        ))}
      </div>
      <section class="clients" aria-labelledby="clients">
        <h3 id="clients">Use this server from other programs</h3>
        <div class="tabs" role="tablist" aria-label="Clients" onKeyDown={move}>
          {all.map((each, at) => (
            <button type="button" id={`tab-${at}`} role="tab" aria-selected={at === chosen} aria-controls="snippet" tabIndex={at === chosen ? 0 : -1} onClick={() => setChosen(at)}>{each.name}</button>
          ))}
        </div>
        <div id="snippet" role="tabpanel" aria-labelledby={`tab-${chosen}`}><Code text={snippet.code} language={snippet.language} /></div>
      </section>
    </div>
  );
}
