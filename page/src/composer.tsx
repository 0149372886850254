/** Takes the next message: text, files as text, and pictures where the model sees. */
import { useEffect, useRef, useState } from "preact/hooks";
import { generate, stop } from "./answer";
import { Icon, IconButton } from "./icons";
import { answeringIn, change, keep, state, tell } from "./state";
import { add, newChat, path } from "./tree";
import type { Picture, TextFile } from "./types";

const MOST_TEXT = 1_000_000; // bytes of a file
const MOST_PICTURE = 8_000_000;

/** Sends a message in the open chat, or in a new one. */
export function send(content: string, files: TextFile[] = [], pictures: Picture[] = []): boolean {
  if (answeringIn(state.chat) || (!content.trim() && !files.length && !pictures.length)) return false;
  if (!state.model) {
    tell("There is no model to ask");
    return false;
  }
  const chat = state.chat ?? newChat(state.settings.system);
  const message = add(chat, {
    parent: path(chat).at(-1)?.id ?? null, role: "user", content: content.trim(),
    ...(files.length && { files }), ...(pictures.length && { pictures }),
  });
  keep(chat);
  change({ chat, view: "chat" });
  void generate(chat, message);
  return true;
}

function pictureOf(file: File): Promise<Picture> {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve({ name: file.name, url: String(reader.result) });
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function textOf(file: File): Promise<TextFile> {
  if (file.size > MOST_TEXT) throw new Error(`${file.name} has ${file.size} bytes; the limit is ${MOST_TEXT}`);
  const text = await file.text();
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file`);
  return { name: file.name, text };
}

export function Composer() {
  const [text, setText] = useState("");
  const [files, setFiles] = useState<TextFile[]>([]);
  const [pictures, setPictures] = useState<Picture[]>([]);
  const area = useRef<HTMLTextAreaElement>(null);
  const chosen = useRef<HTMLInputElement>(null);
  const answering = !!answeringIn(state.chat);

  useEffect(() => area.current?.focus(), [state.chat?.id, state.view]);
  useEffect(() => {
    const box = area.current!;
    box.style.height = "auto";
    box.style.height = `${Math.min(box.scrollHeight + 2, 240)}px`;
  }, [text]);

  const submit = () => {
    if (!send(area.current!.value, files, pictures)) return; // the state may be one key behind
    setText("");
    setFiles([]);
    setPictures([]);
  };
  const attach = async (list: Iterable<File>) => {
    for (const file of list) {
      try {
        if (!file.type.startsWith("image/")) {
          const added = await textOf(file);
          setFiles(before => [...before, added]);
        } else if (!state.sees) throw new Error(`${state.model} cannot see pictures`);
        else if (file.size > MOST_PICTURE) throw new Error(`${file.name} is too large`);
        else {
          const added = await pictureOf(file);
          setPictures(before => [...before, added]);
        }
      } catch (error) {
        tell((error as Error).message);
      }
    }
  };
  const onKeyDown = (event: KeyboardEvent) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      submit();
    } else if (event.key === "ArrowUp" && !text && state.chat && !answering) {
      const mine = path(state.chat).findLast(each => each.role === "user");
      if (mine) {
        event.preventDefault();
        change({ editing: mine.id });
      }
    }
  };
  const onPaste = (event: ClipboardEvent) => {
    const pasted = [...(event.clipboardData?.files ?? [])];
    if (pasted.length) {
      event.preventDefault();
      void attach(pasted);
    }
  };

  return (
    <form
      id="ask"
      onSubmit={event => { event.preventDefault(); submit(); }}
      onDragOver={event => event.preventDefault()}
      onDrop={event => { event.preventDefault(); void attach(event.dataTransfer?.files ?? []); }}
    >
      <div class="composer">
        {(files.length > 0 || pictures.length > 0) && (
          <ul class="attached" aria-label="Attached">
            {files.map(file => <Attached name={file.name} onRemove={() => setFiles(files.filter(each => each !== file))} />)}
            {pictures.map(each => <Attached name={each.name} onRemove={() => setPictures(pictures.filter(other => other !== each))} />)}
          </ul>
        )}
        <textarea id="prompt" ref={area} rows={1} aria-label="Message" placeholder={`Message ${state.model || "the model"}`} value={text} onInput={e => setText(e.currentTarget.value)} onKeyDown={onKeyDown} onPaste={onPaste} />
        <div class="composer-row">
          <input ref={chosen} id="files" type="file" multiple hidden aria-label="Files" onChange={event => { void attach(event.currentTarget.files ?? []); event.currentTarget.value = ""; }} />
          <IconButton icon="clip" label={state.sees ? "Attach files or pictures" : "Attach files as text"} onClick={() => chosen.current?.click()} />
          <span class="hint">Enter sends · Shift+Enter breaks the line · Esc stops</span>
          {answering
            ? <button id="stop" type="button" class="round" aria-label="Stop" title="Stop (Esc)" onClick={stop}><Icon name="stop" /></button>
            : <button id="send" type="submit" class="round primary" aria-label="Send" title="Send (Enter)" disabled={!text.trim() && !files.length && !pictures.length}><Icon name="send" /></button>}
        </div>
      </div>
    </form>
  );
}

function Attached({ name, onRemove }: { name: string; onRemove: () => void }) {
  return <li>{name}<IconButton icon="close" label={`Remove ${name}`} onClick={onRemove} /></li>;
}
