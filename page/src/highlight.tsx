/** Highlights code as elements: no HTML is made from text. */
import { createLowlight } from "lowlight";
import bash from "highlight.js/lib/languages/bash";
import c from "highlight.js/lib/languages/c";
import cpp from "highlight.js/lib/languages/cpp";
import csharp from "highlight.js/lib/languages/csharp";
import css from "highlight.js/lib/languages/css";
import diff from "highlight.js/lib/languages/diff";
import go from "highlight.js/lib/languages/go";
import ini from "highlight.js/lib/languages/ini";
import java from "highlight.js/lib/languages/java";
import javascript from "highlight.js/lib/languages/javascript";
import json from "highlight.js/lib/languages/json";
import kotlin from "highlight.js/lib/languages/kotlin";
import php from "highlight.js/lib/languages/php";
import python from "highlight.js/lib/languages/python";
import ruby from "highlight.js/lib/languages/ruby";
import rust from "highlight.js/lib/languages/rust";
import shell from "highlight.js/lib/languages/shell";
import sql from "highlight.js/lib/languages/sql";
import swift from "highlight.js/lib/languages/swift";
import typescript from "highlight.js/lib/languages/typescript";
import xml from "highlight.js/lib/languages/xml";
import yaml from "highlight.js/lib/languages/yaml";
import type { ComponentChildren } from "preact";

const LONGEST = 40_000; // characters: more would hold up the page
const known = createLowlight({
  bash, c, cpp, csharp, css, diff, go, ini, java, javascript, json, kotlin, php, python, ruby, rust, shell, sql, swift,
  typescript, xml, yaml,
});

interface Part {
  type: string;
  value?: string;
  properties?: { className?: string[] };
  children?: Part[];
}

export function highlighted(code: string, language: string): ComponentChildren {
  if (!known.registered(language) || code.length > LONGEST) return code;
  return elements((known.highlight(language, code) as Part).children ?? []);
}

function elements(parts: Part[]): ComponentChildren {
  return parts.map(part =>
    part.type === "text" ? part.value : <span class={part.properties?.className?.join(" ")}>{elements(part.children ?? [])}</span>,
  );
}
