{{- /*
SPDX-FileCopyrightText: The Partage Authors
SPDX-License-Identifier: Apache-2.0
*/ -}}

{{- /* The driver name is part of the interface: selectors, device classes and tools are keyed on it. */ -}}
{{- define "partage.driverName" -}}gpu.nvidia.com{{- end -}}

{{- define "partage.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "partage.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains (include "partage.name" .) .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "partage.name" .) | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "partage.selectorLabels" -}}
app.kubernetes.io/name: {{ include "partage.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "partage.labels" -}}
{{ include "partage.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end -}}

{{- define "partage.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (printf "%s-gpu-kubelet-plugin" (include "partage.fullname" .)) .Values.serviceAccount.name -}}
{{- else -}}
{{- .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "partage.supervisorAccountName" -}}
{{- default (printf "%s-mps-supervisor" (include "partage.fullname" .)) .Values.mpsSupervisor.serviceAccountName -}}
{{- end -}}

{{- define "partage.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{- /*
Where the plugin sees a host path. Arguments: path and driverRoot on the host;
default, the path that every privileged container already has; mount, where
the DaemonSet mounts a path that is neither that nor inside the driver root.
*/ -}}
{{- define "partage.containerPath" -}}
{{- $path := clean .path -}}
{{- $driverRoot := clean .driverRoot -}}
{{- if eq $path .default -}}
{{- .default -}}
{{- else if eq $path $driverRoot -}}
/driver-root
{{- else if hasPrefix (printf "%s/" (trimSuffix "/" $driverRoot)) $path -}}
{{- printf "/driver-root/%s" (trimPrefix "/" (trimPrefix $driverRoot $path)) -}}
{{- else -}}
{{- .mount -}}
{{- end -}}
{{- end -}}
{{- define "partage.devRoot" -}}
{{- include "partage.containerPath" (dict "path" .Values.host.devRoot "driverRoot" .Values.host.driverRoot "default" "/" "mount" "/dev-root") -}}
{{- end -}}
{{- define "partage.procRoot" -}}
{{- include "partage.containerPath" (dict "path" .Values.host.procRoot "driverRoot" .Values.host.driverRoot "default" "/proc" "mount" "/proc-root") -}}
{{- end -}}
{{- define "partage.sysRoot" -}}
{{- include "partage.containerPath" (dict "path" .Values.host.sysRoot "driverRoot" .Values.host.driverRoot "default" "/sys" "mount" "/sys-root") -}}
{{- end -}}

{{- define "partage.pluginsDir" -}}{{ clean .Values.host.kubeletDir }}/plugins{{- end -}}
{{- define "partage.registrarDir" -}}{{ clean .Values.host.kubeletDir }}/plugins_registry{{- end -}}

{{- /* A duration of Go's as a number of seconds. */ -}}
{{- define "partage.seconds" -}}
{{- $seconds := 0.0 -}}
{{- range regexFindAll "[0-9]+(\\.[0-9]+)?(ms|s|m|h)" . -1 -}}
{{- $unit := regexFind "[a-z]+" . -}}
{{- $seconds = addf $seconds (mulf (float64 (trimSuffix $unit .)) (get (dict "ms" 0.001 "s" 1.0 "m" 60.0 "h" 3600.0) $unit)) -}}
{{- end -}}
{{- $seconds -}}
{{- end -}}
