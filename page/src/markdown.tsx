/** Shows Markdown. What a model writes is not trusted: HTML in it is shown as text, pictures from elsewhere are links. */
import { Lexer, type Token, type Tokens } from "marked";
import { Component, type ComponentChildren } from "preact";
import { highlighted } from "./highlight";
import { copy } from "./state";

const ENTITIES: Record<string, string> = {
  amp: "&", lt: "<", gt: ">", quot: '"', apos: "'", nbsp: "\u00a0", copy: "©", hellip: "…", mdash: "—", ndash: "–",
  rarr: "→", larr: "←", times: "×", le: "≤", ge: "≥", ne: "≠", deg: "°", middot: "·",
};

function decoded(text: string): string {
  return text.replace(/&(#x[0-9a-f]{1,6}|#\d{1,7}|\w+);/gi, (whole, name: string) => {
    if (name[0] !== "#") return ENTITIES[name] ?? whole;
    const code = name[1]!.toLowerCase() === "x" ? parseInt(name.slice(2), 16) : Number(name.slice(1));
    return code > 0 && code <= 0x10ffff ? String.fromCodePoint(code) : whole;
  });
}

export function Markdown({ text }: { text: string }) {
  return <div class="markdown">{new Lexer({ gfm: true }).lex(text).map((token, at) => <Block key={at} token={token} />)}</div>;
}

/** Is drawn again only if its text has changed: all but the last block of an answer stay as they are. */
class Block extends Component<{ token: Token }> {
  shouldComponentUpdate(next: { token: Token }): boolean {
    return next.token.raw !== this.props.token.raw || next.token.type !== this.props.token.type;
  }

  render() {
    return block(this.props.token);
  }
}

const blocks = (tokens: Token[] = []): ComponentChildren => tokens.map(block);

function block(token: Token): ComponentChildren {
  switch (token.type) {
    case "space":
    case "def":
      return null;
    case "hr":
      return <hr />;
    case "heading": {
      const Heading = `h${Math.min((token as Tokens.Heading).depth + 2, 6)}` as "h3";
      return <Heading>{inlines(token.tokens)}</Heading>;
    }
    case "code":
      return <Code text={(token as Tokens.Code).text} language={(token as Tokens.Code).lang ?? ""} />;
    case "blockquote":
      return <blockquote>{blocks(token.tokens)}</blockquote>;
    case "list":
      return list(token as Tokens.List);
    case "table":
      return table(token as Tokens.Table);
    case "paragraph":
      return <p>{inlines(token.tokens)}</p>;
    case "text":
      return token.tokens ? inlines(token.tokens) : decoded((token as Tokens.Text).text);
    case "checkbox":
      return null; // list() shows it
    default:
      return <p>{token.raw}</p>;
  }
}

function list(token: Tokens.List): ComponentChildren {
  const items = token.items.map(item => (
    <li class={item.task ? "task" : undefined}>
      {item.task && <input type="checkbox" checked={item.checked} disabled aria-label={item.checked ? "done" : "to do"} />}
      {blocks(item.tokens)}
    </li>
  ));
  return token.ordered ? <ol start={Number(token.start) || 1}>{items}</ol> : <ul>{items}</ul>;
}

function table(token: Tokens.Table): ComponentChildren {
  const aligned = (at: number): string | undefined => token.align[at] ?? undefined;
  return (
    <div class="scroll" role="region" aria-label="Table" tabIndex={0}>
      <table>
        <thead>
          <tr>{token.header.map((cell, at) => <th scope="col" class={aligned(at)}>{inlines(cell.tokens)}</th>)}</tr>
        </thead>
        <tbody>
          {token.rows.map(row => <tr>{row.map((cell, at) => <td class={aligned(at)}>{inlines(cell.tokens)}</td>)}</tr>)}
        </tbody>
      </table>
    </div>
  );
}

const inlines = (tokens: Token[] = []): ComponentChildren => tokens.map(inline);

function inline(token: Token): ComponentChildren {
  switch (token.type) {
    case "strong":
      return <strong>{inlines(token.tokens)}</strong>;
    case "em":
      return <em>{inlines(token.tokens)}</em>;
    case "del":
      return <del>{inlines(token.tokens)}</del>;
    case "codespan":
      return <code>{(token as Tokens.Codespan).text}</code>;
    case "br":
      return <br />;
    case "link":
      return <Link href={(token as Tokens.Link).href}>{inlines(token.tokens)}</Link>;
    case "image":
      return <Link href={(token as Tokens.Image).href}>{`Picture: ${(token as Tokens.Image).text || "without a title"}`}</Link>;
    case "text":
      return token.tokens ? inlines(token.tokens) : decoded((token as Tokens.Text).text);
    case "escape":
      return (token as Tokens.Escape).text;
    default:
      return token.raw;
  }
}

function Link({ href, children }: { href: string; children: ComponentChildren }) {
  if (!/^(https?:\/\/|mailto:)/i.test(href)) return <>{children}</>;
  return <a href={href} target="_blank" rel="noopener noreferrer nofollow">{children}</a>;
}

export function Code({ text, language }: { text: string; language: string }) {
  const name = language.trim().split(/\s+/)[0]!.toLowerCase();
  return (
    <div class="code">
      <div class="code-head">
        <span>{name || "text"}</span>
        <button type="button" class="quiet" onClick={() => void copy(text, "Code")}>Copy</button>
      </div>
      <pre tabIndex={0}><code>{highlighted(text, name)}</code></pre>
    </div>
  );
}
