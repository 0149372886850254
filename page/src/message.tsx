/** Shows one message, with what can be done with it. */
import { Component } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { edit, generate, giveResult, otherBranch, regenerate } from "./answer";
import { IconButton } from "./icons";
import { Code, Markdown } from "./markdown";
import { answeringIn, change, changed, copy, keep, state } from "./state";
import { choose, fork, path, remove, siblings } from "./tree";
import type { Chat, Message, TokenChance, ToolCall } from "./types";
import { courseOfMessage, StageList, Stages, why } from "./why";

interface Props {
  chat: Chat;
  message: Message;
  live: boolean; // it is being written now
  version: string; // changes whenever it must be drawn again
}

/** Returns what a message's picture depends on. */
export function versionOf(chat: Chat, message: Message): string {
  const beside = siblings(chat, message.parent);
  const parts = [
    beside.length, beside.indexOf(message), message.content.length, message.reasoning?.length, message.chances?.length,
    JSON.stringify(message.calls), message.finish, message.error, state.editing === message.id, !!answeringIn(chat),
    path(chat).at(-1)?.id === message.id,
  ];
  return parts.join();
}

export class MessageView extends Component<Props, { broken: boolean }> {
  /** What was imported may be anything: it must not take the page with it. */
  static getDerivedStateFromError() {
    return { broken: true };
  }

  shouldComponentUpdate(next: Props, state: { broken: boolean }): boolean {
    return state.broken || next.message !== this.props.message || next.version !== this.props.version || next.live !== this.props.live;
  }

  render({ chat, message, live }: Props, { broken }: { broken: boolean }) {
    if (broken) return <p class="error">This message cannot be shown.</p>;
    const who = { user: "You", assistant: message.model || "Assistant", tool: "Tool result" }[message.role];
    return (
      <article class={`message ${message.role}`} aria-busy={live} aria-label={`${who} said`}>
        <h2>{who}</h2>
        {state.editing === message.id ? <Editor chat={chat} message={message} /> : <Body chat={chat} message={message} live={live} />}
        {state.editing !== message.id && !live && <Actions chat={chat} message={message} />}
      </article>
    );
  }
}

function Body({ chat, message, live }: Omit<Props, "version">) {
  return (
    <>
      {message.pictures?.map(each => <img class="picture" src={each.url} alt={each.name} />)}
      {message.files?.map(file => (
        <details class="fold"><summary>File: {file.name}</summary><Code text={file.text} language="" /></details>
      ))}
      {message.reasoning && (
        <details class="fold reasoning">
          <summary>Reasoning{live && !message.content ? "…" : ""}</summary>
          <Markdown text={message.reasoning} />
        </details>
      )}
      <Said message={message} live={live} />
      {message.calls?.map(call => <Call chat={chat} message={message} call={call} live={live} />)}
      {message.error && <p class="error" role="alert">{message.error}</p>}
      {message.finish === "repetition" && !live && <Looped chat={chat} message={message} />}
      {message.role === "assistant" && !live && <Note message={message} />}
    </>
  );
}

function Said({ message, live }: { message: Message; live: boolean }) {
  if (message.role === "tool") return <Code text={message.content} language="json" />;
  if (message.role === "user") return <div class="said">{message.content}</div>;
  if (live && !message.content && !message.reasoning && !message.calls) {
    return <p class="dots" aria-label="Waiting for the first token"><i /><i /><i /></p>;
  }
  return <Markdown text={message.content} />;
}

function Call({ chat, message, call, live }: Omit<Props, "version"> & { call: ToolCall }) {
  const [result, setResult] = useState("");
  const answered = Object.values(chat.messages).some(each => each.callId === call.id);
  return (
    <details class="fold call" open={!answered && !live}>
      <summary>Tool call: <code>{call.name}</code></summary>
      <Code text={pretty(call.arguments)} language="json" />
      {!answered && !live && (
        <div class="row">
          <input aria-label={`Result of ${call.name}`} placeholder="What it returns" value={result} onInput={e => setResult(e.currentTarget.value)} />
          <button type="button" onClick={() => giveResult(chat, message, call, result)}>Send the result</button>
        </div>
      )}
    </details>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

/** Says that the loop guard ended an answer, and what can be done. */
function Looped({ chat, message }: { chat: Chat; message: Message }) {
  const tokens = message.report?.loops?.[0]?.phrase_tokens;
  return (
    <div class="ended">
      <p>The server ended this answer because it repeated {tokens ? `the same ${tokens === 1 ? "token" : `${tokens} tokens`}` : "itself"} without end.</p>
      <p>To avoid this, set a temperature or a repetition penalty in the settings.</p>
      <button type="button" disabled={!!answeringIn(chat)} onClick={() => regenerate(chat, message, { loops: true })}>Regenerate and let it repeat</button>
    </div>
  );
}

function Note({ message }: { message: Message }) {
  const [open, setOpen] = useState(false);
  const course = courseOfMessage(message);
  const parts: string[] = [];
  if (message.firstMs !== undefined) parts.push(`first token after ${message.firstMs} ms`);
  const usage = message.usage;
  if (usage) {
    const seen = ((message.totalMs ?? 0) - (message.firstMs ?? 0)) / 1000;
    const decoding = message.report?.choices?.[0]?.seconds?.decode ?? seen; // a busy browser sees tokens late and together
    const rate = usage.completion_tokens > 1 && decoding > 0 ? `, ${((usage.completion_tokens - 1) / decoding).toFixed(0)} a second` : "";
    parts.push(`${usage.completion_tokens} tokens${rate}`);
    const cached = usage.prompt_tokens_details?.cached_tokens;
    parts.push(`${usage.prompt_tokens} in the prompt${cached ? `, ${cached} of them from the cache` : ""}`);
  }
  if (message.finish === "stopped") parts.push("stopped");
  if (message.finish === "length") parts.push("cut at the token limit");
  const ignored = message.report?.ignored_fields;
  if (ignored?.length) parts.push(`ignored: ${ignored.join(", ")}`);
  if (!parts.length) return null;
  return (
    <div class="note">
      <span class="figures">{parts.join(" · ")}</span>
      {course && <button type="button" class="link" aria-expanded={open} onClick={() => setOpen(!open)}>{open ? "Hide the times" : "Where did the time go?"}</button>}
      {open && course && (
        <div class="times">
          <Stages course={course} />
          <StageList course={course} />
          <p>{why(course)}</p>
          {message.report?.route?.map(each => <p>Route: {each}</p>)}
        </div>
      )}
      {message.chances && <Chances chances={message.chances} />}
    </div>
  );
}

/** Shows every token with its probability, and what else it could have been. */
function Chances({ chances }: { chances: TokenChance[] }) {
  const [at, setAt] = useState<number | null>(null);
  const shown = at === null ? null : chances[at];
  return (
    <details class="fold chances">
      <summary>Token probabilities</summary>
      <p>Choose a token to see what else it could have been.</p>
      <div class="tokens">
        {chances.map((each, index) => (
          <button type="button" class={`token chance-${level(each.logprob)}`} aria-pressed={index === at} aria-label={`${visible(each.token)}, ${percent(each.logprob)}`} onClick={() => setAt(index)}>
            {visible(each.token)}
          </button>
        ))}
      </div>
      {shown && (
        <table class="figures-table" aria-label="Alternatives">
          <tbody>
            {shown.top.map(each => (
              <tr class={each.token === shown.token ? "taken" : undefined}>
                <td><code>{visible(each.token)}</code></td>
                <td>{percent(each.logprob)}</td>
                <td class="bar"><span style={{ width: `${100 * Math.exp(each.logprob)}%` }} /></td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </details>
  );
}

const percent = (logprob: number): string => `${(100 * Math.exp(logprob)).toFixed(1)} %`;
const level = (logprob: number): number => [0.9, 0.6, 0.3].filter(bound => Math.exp(logprob) < bound).length;
const visible = (token: string): string => token.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";

function Editor({ chat, message }: { chat: Chat; message: Message }) {
  const [text, setText] = useState(message.content);
  const area = useRef<HTMLTextAreaElement>(null);
  useEffect(() => area.current?.focus(), []);
  const submit = () => edit(chat, message, area.current!.value); // the state may be one key behind
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      change({ editing: "" });
    } else if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) submit();
  };
  return (
    <form class="editor" onSubmit={event => { event.preventDefault(); submit(); }}>
      <textarea ref={area} rows={Math.min(text.split("\n").length + 1, 16)} aria-label="Edited message" value={text} onInput={e => setText(e.currentTarget.value)} onKeyDown={onKeyDown} />
      <div class="row">
        <button type="submit" class="primary">{message.role === "assistant" ? "Save as a branch" : "Send as a branch"}</button>
        <button type="button" onClick={() => change({ editing: "" })}>Cancel</button>
      </div>
    </form>
  );
}

function Actions({ chat, message }: { chat: Chat; message: Message }) {
  const all = siblings(chat, message.parent);
  const place = all.indexOf(message);
  const busy = !!answeringIn(chat);
  const goTo = (other?: Message) => {
    if (other) choose(chat, other);
    keep(chat);
    changed();
  };
  const drop = () => {
    const follows = siblings(chat, message.id).length > 0;
    if (follows && !confirm("Delete this message and all that follows it?")) return;
    remove(chat, message);
    keep(chat);
    changed();
  };
  const branch = () => {
    const copy = fork(chat, message);
    keep(copy);
    change({ chat: copy });
  };
  const last = path(chat).at(-1) === message;
  return (
    <div class="actions" role="group" aria-label="Message">
      {all.length > 1 && (
        <span class="branches" role="group" aria-label="Branches">
          <IconButton icon="left" label="Previous branch" disabled={busy || place === 0} onClick={() => goTo(otherBranch(chat, message, -1))} />
          <span class="place">{place + 1} / {all.length}</span>
          <IconButton icon="right" label="Next branch" disabled={busy || place === all.length - 1} onClick={() => goTo(otherBranch(chat, message, 1))} />
        </span>
      )}
      <IconButton icon="copy" label="Copy" onClick={() => void copy(message.content, "Message")} />
      <IconButton icon="edit" label="Edit" disabled={busy} onClick={() => change({ editing: message.id })} />
      {message.role === "assistant" && (
        <>
          <IconButton icon="redo" label="Regenerate" disabled={busy} onClick={() => regenerate(chat, message)} />
          {!message.chances && <IconButton icon="chance" label="Regenerate with token probabilities" disabled={busy} onClick={() => regenerate(chat, message, { chances: true })} />}
          {last && message.content && ["stopped", "length"].includes(message.finish ?? "") && (
            <IconButton icon="next" label="Continue" disabled={busy} onClick={() => void generate(chat, chat.messages[message.parent!]!, { more: message })} />
          )}
        </>
      )}
      <IconButton icon="fork" label="Branch into a new chat" disabled={busy} onClick={branch} />
      <IconButton icon="bin" label="Delete from here" disabled={busy} onClick={drop} />
    </div>
  );
}
