/** The dialog that lists the keys. */
import { useEffect, useRef } from "preact/hooks";
import { change } from "./state";

export const KEYS: [string, string][] = [
  ["Enter", "Send the message"],
  ["Shift+Enter", "Break the line"],
  ["Esc", "Stop the answer; close what is open"],
  ["↑ in an empty message", "Edit your last message"],
  ["Ctrl+Enter", "Send an edited message"],
  ["Alt+N", "New chat"],
  ["Alt+K", "Search the chats"],
  ["Alt+E", "Engine or chat"],
  ["Alt+S", "Settings"],
  ["Alt+R", "Regenerate the last answer"],
  ["Alt+C", "Copy the last answer"],
  ["Alt+← and Alt+→", "Other branch of the last answer"],
  ["Alt+H", "This list"],
];

export function Help() {
  const dialog = useRef<HTMLDialogElement>(null);
  useEffect(() => dialog.current?.showModal(), []);
  return (
    <dialog id="help" ref={dialog} aria-labelledby="keys" onClose={() => change({ help: false })}>
      <h2 id="keys">Keys</h2>
      <dl class="keys">{KEYS.map(([key, meaning]) => <div><dt><kbd>{key}</kbd></dt><dd>{meaning}</dd></div>)}</dl>
      <form method="dialog"><button class="primary">Close</button></form>
    </dialog>
  );
}
