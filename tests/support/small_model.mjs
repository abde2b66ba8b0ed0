// A real small language model behind the OpenAI protocol, on loopback: node small_model.mjs MODEL.gguf READY_FILE
//
// It writes its port into READY_FILE. An answer is a stream (always; that is all the tests ask for). Where tools are
// offered and the last message is not a tool's result, the grammar of their schemas forces a call of one of them. It
// stops computing when its client leaves: GET /stats tells how many tokens were made, and how many answers were cut.

import { writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { getLlama, LlamaChatSession } from "node-llama-cpp";

const [modelPath, readyFile] = process.argv.slice(2);
const MOST_TOKENS = 48;
const stats = { asked: 0, tokens: 0, completed: 0, cut: 0 };

const llama = await getLlama({ gpu: false, build: "never", logLevel: "error", maxThreads: 2 });
const model = await llama.loadModel({ modelPath, gpuLayers: 0 });
const context = await model.createContext({ contextSize: 2048 });
const sequence = context.getSequence();
let turn = Promise.resolve(); // one sequence: answers are given one after the other

async function answer(asked, response) {
  stats.asked += 1;
  const left = new AbortController();
  response.on("close", () => response.writableFinished || left.abort());
  const send = (choices, more = {}) => {
    const head = { id: `small_${stats.asked}`, object: "chat.completion.chunk", created: 1, model: asked.model };
    response.write(`data: ${JSON.stringify({ ...head, choices, ...more })}\n\n`);
  };
  const delta = (content, finish_reason = null) => send([{ index: 0, delta: content, finish_reason }]);
  const options = {
    maxTokens: asked.max_tokens ?? MOST_TOKENS,
    temperature: 0,
    signal: left.signal,
    onToken: (tokens) => (stats.tokens += tokens.length),
  };
  response.writeHead(200, { "content-type": "text/event-stream" });
  const before = stats.tokens;
  try {
    await sequence.clearHistory();
    const session = new LlamaChatSession({ contextSequence: sequence, autoDisposeSequence: false });
    const last = asked.messages.at(-1);
    const words = typeof last.content === "string" ? last.content : JSON.stringify(last.content);
    if (asked.tools?.length && last.role !== "tool") {
      const call = await choose(session, asked.tools, words, options);
      const id = `call_${stats.asked}`;
      delta({ tool_calls: [{ index: 0, id, type: "function", function: { name: call.name, arguments: "" } }] });
      for (const piece of JSON.stringify(call.arguments).match(/.{1,6}/gs)) {
        delta({ tool_calls: [{ index: 0, function: { arguments: piece } }] });
      }
      delta({}, "tool_calls");
    } else {
      await session.prompt(words, { ...options, onTextChunk: (text) => delta({ content: text }) });
      delta({}, "stop");
    }
    const usage = { prompt_tokens: words.length, completion_tokens: stats.tokens - before };
    send([], { usage: { ...usage, total_tokens: usage.prompt_tokens + usage.completion_tokens } });
    response.end("data: [DONE]\n\n");
    stats.completed += 1;
  } catch (problem) {
    if (!left.signal.aborted) console.error(problem);
    else stats.cut += 1;
    response.destroy();
  }
}

async function choose(session, tools, words, options) {
  const calls = tools.map(({ function: tool }) => ({
    type: "object",
    properties: { name: { const: tool.name }, arguments: tool.parameters },
  }));
  const grammar = await llama.createGrammarForJsonSchema({ oneOf: calls });
  const described = JSON.stringify(tools.map(({ function: tool }) => tool));
  const said = await session.prompt(`Call one tool, in JSON. Tools: ${described}\n${words}`, { ...options, grammar });
  return grammar.parse(said);
}

const server = createServer((request, response) => {
  if (request.url === "/stats") {
    response.setHeader("content-type", "application/json");
    response.end(JSON.stringify(stats));
    return;
  }
  let body = "";
  request.on("data", (part) => (body += part));
  request.on("end", () => {
    turn = turn.then(() => answer(JSON.parse(body), response)).catch((problem) => console.error(problem));
  });
});
server.listen(0, "127.0.0.1", () => writeFileSync(readyFile, String(server.address().port)));
