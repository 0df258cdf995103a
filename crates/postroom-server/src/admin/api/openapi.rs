//! The description in OpenAPI 3.1, made of the list of endpoints and of the schemas of the commands' `--json`.

use serde_json::{Map, Value, json};

use super::endpoints::{Endpoint, Parameter};
use crate::admin::tokens::Role;

/// The schemas that commands have too.
const SHARED: &[(&str, &str)] = &[
    ("status", include_str!("../../../../../docs/json/status.schema.json")),
    ("sizes", include_str!("../../../../../docs/json/sizes.schema.json")),
    ("routes-list", include_str!("../../../../../docs/json/routes-list.schema.json")),
    ("routes-set", include_str!("../../../../../docs/json/routes-set.schema.json")),
    ("routes-forget", include_str!("../../../../../docs/json/routes-forget.schema.json")),
    ("messages-list", include_str!("../../../../../docs/json/messages-list.schema.json")),
    ("message", include_str!("../../../../../docs/json/messages-show.schema.json")),
    ("why", include_str!("../../../../../docs/json/why.schema.json")),
    ("keys-list", include_str!("../../../../../docs/json/keys-list.schema.json")),
    ("keys-act", include_str!("../../../../../docs/json/keys-act.schema.json")),
    ("dead-letters", include_str!("../../../../../docs/json/dead-letters.schema.json")),
    ("dead-note", include_str!("../../../../../docs/json/dead-note.schema.json")),
    ("operations-list", include_str!("../../../../../docs/json/operations-list.schema.json")),
    ("operation", include_str!("../../../../../docs/json/operation.schema.json")),
    ("reconcile", include_str!("../../../../../docs/json/reconcile.schema.json")),
];
/// What the commands compute for people, or know of the configuration.
const NOT_HERE: &[(&str, &[&str])] =
    &[("status", &["attention", "verdict"]), ("sizes", &["capacity_bytes", "days_until_full"])];

/// The schema of this name; none: it has none, such as bytes.
pub(super) fn schema(name: &str) -> Option<Value> {
    if let Some((_, text)) = SHARED.iter().find(|(shared, _)| *shared == name) {
        let mut schema: Value = serde_json::from_str(text).unwrap_or_default();
        if let Some(fields) = schema.as_object_mut() {
            fields.remove("$schema");
        }
        for left_out in NOT_HERE.iter().filter(|(of, _)| *of == name).flat_map(|(_, fields)| fields.iter()) {
            if let Some(properties) = schema["properties"].as_object_mut() {
                properties.remove(*left_out);
            }
            if let Some(required) = schema["required"].as_array_mut() {
                required.retain(|field| field != left_out);
            }
        }
        return Some(schema);
    }
    let reason =
        json!({ "type": "string", "minLength": 1, "maxLength": 4000, "description": "recorded in the audit row" });
    let object = |properties: Value, required: &[&str]| json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false });
    let text = || json!({ "type": "string" });
    Some(match name {
        "reason" => object(json!({ "reason": reason }), &["reason"]),
        "new-note" => {
            object(json!({ "group": text(), "note": text(), "reason": reason }), &["group", "note", "reason"])
        }
        "forget" => object(json!({ "discard": { "type": "boolean" }, "reason": reason }), &["reason"]),
        "route-change" => object(
            json!({
                "topics": { "type": "array", "items": text() },
                "order": { "enum": ["key", "pipelined", "none"] },
                "on_dead": { "enum": ["skip", "block"] },
                "reason": reason,
            }),
            &["reason"],
        ),
        "new-operation" => object(
            json!({
                "kind": { "enum": ["replay", "retry", "discard"] },
                "side": { "enum": ["out", "in"] },
                "route": text(),
                "filter": object(
                    json!({
                        "ids": { "type": "array", "items": { "type": "string", "format": "uuid" } },
                        "since_ms": { "type": "integer" }, "until_ms": { "type": "integer" },
                        "topic": text(), "type": text(), "key": text(), "tenant_id": text(), "aggregate_id": text(),
                        "error": text(), "group": text(),
                    }),
                    &[],
                ),
                "all": { "type": "boolean" },
                "canary": { "type": "integer", "minimum": 1 },
                "goes_on": { "type": "boolean" },
                "rate": { "type": "integer", "minimum": 1 },
                "place": { "enum": ["before", "behind"] },
                "new_ids": { "type": "boolean" },
                "dry_run": { "type": "boolean" },
                "reason": text(),
            }),
            &["kind", "route"],
        ),
        "operation-begun" => object(
            json!({ "operation": { "type": ["string", "null"] }, "preview": { "type": "object" } }),
            &["operation", "preview"],
        ),
        "headlines" => object(
            json!({
                "headlines": { "type": "array", "items": { "type": "object" } },
                "next": { "type": ["object", "null"], "description": "the parameters of the next page; null: this is the last one" },
            }),
            &["headlines", "next"],
        ),
        "problem" => object(
            json!({ "type": text(), "title": text(), "status": { "type": "integer" }, "code": text(), "detail": text() }),
            &["type", "title", "status", "code", "detail"],
        ),
        _ => return None,
    })
}

/// The whole document.
pub(super) fn document(endpoints: &[Endpoint]) -> Value {
    let (mut paths, mut schemas) = (Map::new(), Map::new());
    let mut refer = |name: &str| -> Option<Value> {
        schemas.entry(name).or_insert(schema(name)?);
        Some(json!({ "$ref": format!("#/components/schemas/{name}") }))
    };
    let problem = json!({
        "description": "Why not", "content": { "application/problem+json": { "schema": refer("problem") } }
    });
    for endpoint in endpoints {
        let content = match endpoint.answer {
            "payload" => json!({ "application/octet-stream": {} }),
            "events" => json!({ "text/event-stream": {} }),
            name => json!({ "application/json": { "schema": refer(name) } }),
        };
        let parts = endpoint.path.split(['{', '}']).skip(1).step_by(2);
        let part = |name: &str| json!({ "name": name, "in": "path", "required": true, "schema": { "type": "string" } });
        let parameter = |of: &Parameter| json!({ "name": of.name, "in": "query", "description": of.meaning, "schema": of.takes.schema() });
        let parameters: Vec<Value> = parts.map(part).chain(endpoint.query.iter().map(parameter)).collect();
        let role = match endpoint.role {
            Role::Viewer => "viewer",
            Role::Operator => "operator",
            Role::Admin => "admin",
        };
        let mut operation = json!({
            "summary": endpoint.summary,
            "description": format!("Role: {role}{}.", if endpoint.payloads { ", with the right to see payloads" } else { "" }),
            "parameters": parameters,
            "responses": { "2XX": { "description": "Done", "content": content }, "default": problem },
        });
        if let Some(body) = endpoint.body {
            operation["requestBody"] =
                json!({ "required": true, "content": { "application/json": { "schema": refer(body) } } });
        }
        paths.entry(endpoint.path).or_insert_with(|| json!({}))[endpoint.method.as_str()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": { "title": "postroom", "version": "1", "description": "The admin API of a running postroom" },
        "servers": [{ "url": "/api/v1" }],
        "security": [{ "token": [] }],
        "paths": paths,
        "components": { "schemas": schemas, "securitySchemes": { "token": { "type": "http", "scheme": "bearer" } } },
    })
}
