{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0

Parts of CEL expressions: CEL has no functions of one's own. What faults are called is what
pkg/api and pkg/util/strict say.
*/ -}}

{{- /* A list of strings. */ -}}
{{- define "partage.celList" -}}
{{ . | mustToJson | replace "\"" "'" | replace "," ", " }}
{{- end -}}

{{- /* The strings of a list, quoted, as a part of a text in single quotes. */ -}}
{{- define "partage.celNames" -}}
{{ range $n, $name := . }}{{ if $n }}, {{ end }}"{{ $name }}"{{ end }}
{{- end -}}

{{- /* A string that somebody else wrote, quoted and not too long. */ -}}
{{- define "partage.celQuote" -}}
strings.quote({{ . }}.size() > 64 ? {{ . }}.substring(0, 64) + '…' : {{ . }})
{{- end -}}

{{- /* That a value has the wrong type. Arguments: the value, what it must be. */ -}}
{{- define "partage.celWrongType" -}}
{{- $value := index . 0 -}}
(type({{ $value }}) == string ? ': Invalid value: ' + {{ include "partage.celQuote" $value }} + ': must be {{ index . 1 }}, is a string'
: type({{ $value }}) == map ? ': Invalid value: must be {{ index . 1 }}, is an object'
: type({{ $value }}) == list ? ': Invalid value: must be {{ index . 1 }}, is a list'
: type({{ $value }}) == bool ? ': Invalid value: "' + string({{ $value }}) + '": must be {{ index . 1 }}, is true or false'
: {{ $value }} == null ? ': Invalid value: must be {{ index . 1 }}, is empty; leave the field out'
: ': Invalid value: ' + string({{ $value }}) + ': must be {{ index . 1 }}, is ' + (type({{ $value }}) == int ? 'a whole number' : 'a number'))
{{- end -}}

{{- /*
The faults of a field that is one of some strings. Arguments: a list of {at, of}, where "of"
is the object that has the field; the name of the field; the strings.
*/ -}}
{{- define "partage.celOneOf" -}}
{{- $field := printf "x.of.%s" (index . 1) -}}
{{ index . 0 }}.filter(x, has({{ $field }}) && {{ $field }} != null && !({{ $field }} in {{ include "partage.celList" (index . 2) }}))
.map(x, x.at + '.{{ index . 1 }}' + (type({{ $field }}) == string ? ': Unsupported value: ' + {{ include "partage.celQuote" $field }} + ': supported values: {{ include "partage.celNames" (index . 2) }}'
: {{ include "partage.celWrongType" (list $field "a string") }}))
{{- end -}}

{{- /*
The faults of names in objects. An object with very many is not read. Arguments: a list of
{at, of}; the known names in order.
*/ -}}
{{- define "partage.celUnknown" -}}
{{- $known := include "partage.celList" (index . 1) -}}
{{ index . 0 }}.filter(x, x.of.size() > 32 || !x.of.all(name, name in {{ $known }}))
.map(x, x.of.size() > 32 ? x.at + ': Invalid value: ' + string(x.of.size()) + ' fields, of which some are unknown fields, known here: {{ join ", " (index . 1) }}'
: x.of.filter(name, !(name in {{ $known }}))
.map(name, x.at + '.' + (name.matches(r'^[0-9A-Za-z_-]{1,64}$') ? name : {{ include "partage.celQuote" "name" }}) + ': Invalid value: unknown field, known here: {{ join ", " (index . 1) }}').join('; '))
{{- end -}}

{{- /* The faults of a field with an object in it. Arguments: a list of {at, of}; the name of the field. */ -}}
{{- define "partage.celNoObject" -}}
{{- $field := printf "x.of.%s" (index . 1) -}}
{{ index . 0 }}.filter(x, has({{ $field }}) && {{ $field }} != null && type({{ $field }}) != map)
.map(x, x.at + '.{{ index . 1 }}' + {{ include "partage.celWrongType" (list $field "an object") }})
{{- end -}}

{{- /* The objects in a field, each with its way. Arguments: a list of {at, of}; the name of the field. */ -}}
{{- define "partage.celObjects" -}}
{{- $field := printf "x.of.%s" (index . 1) -}}
{{ index . 0 }}.filter(x, has({{ $field }}) && type({{ $field }}) == map).map(x, {'at': dyn(x.at + '.{{ index . 1 }}'), 'of': dyn({{ $field }}), 'parent': dyn(x.of)})
{{- end -}}

{{- /* What is wrong with a limit of memory, or an empty string. */ -}}
{{- define "partage.celMemoryFault" -}}
{{- $text := printf "(type(%s) == string ? %s : string(%s))" . . . -}}
{{- $shown := printf "': Invalid value: ' + (type(%s) == string ? %s : '\"' + (%s == null ? 'null' : string(%s)) + '\"')" . (include "partage.celQuote" .) . . -}}
(type({{ . }}) == map || type({{ . }}) == list ? {{ include "partage.celWrongType" (list . "a string or a number") }}
: {{ . }} == null || type({{ . }}) == bool || (type({{ . }}) == string ? !({{ . }}.matches(r'^\+?[0-9]{1,20}(\.[0-9]{0,9})?([KMGTPE]i|[kMGTPE]|[eE][0-9]{1,2})?$') && isQuantity({{ . }})) : {{ . }} < 0)
? {{ $shown }} + ': must be a quantity of memory such as "512Mi" or "10Gi"'
: quantity({{ $text }}).isLessThan(quantity('1Mi')) ? {{ $shown }} + ': must be at least 1Mi, MPS counts in mebibytes'
: !quantity({{ $text }}).isLessThan(quantity('9223372036854775807')) ? {{ $shown }} + ': must be less than 8Ei'
: '')
{{- end -}}
