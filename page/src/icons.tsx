/** Small pictures on buttons. The buttons' labels say what they mean. */
const PATHS = {
  menu: "M3 5h14M3 10h14M3 15h14",
  plus: "M10 4v12M4 10h12",
  gear: "M4 6h7M15 6h1M4 14h1M9 14h7M13 4v4M7 12v4",
  copy: "M7 7h9v9H7zM4 13V4h9",
  redo: "M15 8a6 6 0 1 0 .5 5M15 4v4h-4",
  edit: "M4 16l1-4 8-8 3 3-8 8zM11 6l3 3",
  bin: "M4 6h12M8 6V4h4v2M6 6l1 10h6l1-10",
  left: "M12 5l-5 5 5 5",
  right: "M8 5l5 5-5 5",
  fork: "M6 4v5a4 4 0 0 0 4 4h4M11 10l3 3-3 3M6 4v12",
  clip: "M14 8l-5 5a2 2 0 0 1-3-3l6-6a3 3 0 0 1 4 4l-6 6a4 4 0 0 1-6-6l5-5",
  picture: "M4 5h12v10H4zM4 13l4-4 3 3 2-2 3 3M12.5 8h.01",
  send: "M10 16V4M5 9l5-5 5 5",
  stop: "M6 6h8v8H6z",
  more: "M5 10h.01M10 10h.01M15 10h.01",
  chance: "M4 16V9M8 16V5M12 16v-4M16 16V7",
  out: "M10 4v9M6 9l4 4 4-4M4 16h12",
  into: "M10 13V4M6 8l4-4 4 4M4 16h12",
  next: "M5 5l6 5-6 5zM14 5v10",
  close: "M5 5l10 10M15 5L5 15",
  help: "M7.5 7.5a2.5 2.5 0 1 1 3.5 2.3c-.7.3-1 .8-1 1.7M10 14.5h.01",
} as const;

export type IconName = keyof typeof PATHS;

export function Icon({ name }: { name: IconName }) {
  return <svg class="icon" viewBox="0 0 20 20" aria-hidden="true"><path d={PATHS[name]} /></svg>;
}

export function IconButton(props: { icon: IconName; label: string; onClick: () => void; id?: string; disabled?: boolean; pressed?: boolean; class?: string }) {
  const { icon, label, onClick, pressed, ...rest } = props;
  return (
    <button type="button" {...rest} class={`icon-button ${props.class ?? ""}`} aria-label={label} title={label} aria-pressed={pressed} onClick={onClick}>
      <Icon name={icon} />
    </button>
  );
}
