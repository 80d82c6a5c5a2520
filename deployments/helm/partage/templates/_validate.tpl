{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* What the schema cannot say. Each message names the value and the way out. */ -}}
{{- define "partage.validate" -}}

{{- if not (.Capabilities.APIVersions.Has "resource.k8s.io/v1") -}}
{{- fail "this cluster does not serve resource.k8s.io/v1: dynamic resource allocation is turned off, or the API server was started with --runtime-config=resource.k8s.io/v1=false" -}}
{{- end -}}

{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) -}}
{{- fail "serviceAccount.create is false, so serviceAccount.name must say which ServiceAccount to use; the default one would give every pod of the namespace the plugin's rights" -}}
{{- end -}}

{{- $claimed := dict -}}
{{- with .Values.deviceClasses.gpu.extendedResourceName -}}
{{- $_ := set $claimed . "gpu.nvidia.com" -}}
{{- end -}}
{{- range $name, $class := .Values.deviceClasses.migProfiles -}}
{{- if has $name (list "gpu.nvidia.com" "mig.nvidia.com") -}}
{{- fail (printf "deviceClasses.migProfiles: %s is a class of this chart already, choose another name" $name) -}}
{{- end -}}
{{- with $class.extendedResourceName -}}
{{- if hasKey $claimed . -}}
{{- fail (printf "deviceClasses: %s and %s both have extendedResourceName %s; the scheduler would use only one of them" (get $claimed .) $name .) -}}
{{- end -}}
{{- $_ := set $claimed . $name -}}
{{- end -}}
{{- end -}}

{{- $mounts := list "/driver-root" (clean .Values.host.cdiDir) (include "partage.registrarDir" .) -}}
{{- range .Values.kubeletPlugin.extraVolumeMounts -}}
{{- if has (clean .mountPath) $mounts -}}
{{- fail (printf "kubeletPlugin.extraVolumeMounts: %s hides what the plugin needs at %s" .name .mountPath) -}}
{{- end -}}
{{- end -}}

{{- end -}}
