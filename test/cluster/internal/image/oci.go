// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"

	"github.com/google/renameio/v2"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/specs-go"
	v1 "github.com/opencontainers/image-spec/specs-go/v1"
)

// nameAnnotation tells containerd under which name to import.
const nameAnnotation = "io.containerd.image.name"

const searchPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

var refRE = regexp.MustCompile(`^[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)+:[A-Za-z0-9_][A-Za-z0-9._-]*$`)

// Image is a single-layer image for this machine's architecture.
type Image struct {
	Ref        string // host/name:tag
	Entrypoint []string
	Env        []string // PATH is added
	User       string
	Layer      *Layer
}

// Write writes the image as an archive of the OCI image layout.
func (i Image) Write(path string) error {
	if !refRE.MatchString(i.Ref) {
		return fmt.Errorf("image reference %q: want host/name:tag", i.Ref)
	}
	layer, err := i.Layer.Tar()
	if err != nil {
		return fmt.Errorf("build image %s: %w", i.Ref, err)
	}
	archive, err := i.archive(layer)
	if err != nil {
		return fmt.Errorf("build image %s: %w", i.Ref, err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return fmt.Errorf("write image %s: %w", i.Ref, err)
	}
	if err := renameio.WriteFile(path, archive, 0o644); err != nil {
		return fmt.Errorf("write image %s: %w", i.Ref, err)
	}
	return nil
}

func (i Image) archive(layer []byte) ([]byte, error) {
	o := &ociWriter{}
	o.tar = tar.NewWriter(&o.out)
	layerDesc := o.blob(v1.MediaTypeImageLayer, layer)
	config := o.json(v1.MediaTypeImageConfig, v1.Image{
		Platform: v1.Platform{Architecture: runtime.GOARCH, OS: "linux"},
		Config:   v1.ImageConfig{Env: append([]string{searchPath}, i.Env...), Entrypoint: i.Entrypoint, User: i.User},
		RootFS:   v1.RootFS{Type: "layers", DiffIDs: []digest.Digest{layerDesc.Digest}},
	})
	manifest := o.json(v1.MediaTypeImageManifest, v1.Manifest{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageManifest, Config: config, Layers: []v1.Descriptor{layerDesc},
	})
	manifest.Platform = &v1.Platform{Architecture: runtime.GOARCH, OS: "linux"}
	manifest.Annotations = map[string]string{nameAnnotation: i.Ref, v1.AnnotationRefName: i.Ref[strings.LastIndex(i.Ref, ":")+1:]}
	index := o.encode(v1.Index{
		Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: v1.MediaTypeImageIndex, Manifests: []v1.Descriptor{manifest},
	})
	o.file(v1.ImageIndexFile, index)
	o.file(v1.ImageLayoutFile, o.encode(v1.ImageLayout{Version: v1.ImageLayoutVersion}))
	if err := o.tar.Close(); err != nil && o.err == nil {
		o.err = err
	}
	return o.out.Bytes(), o.err
}

// ociWriter remembers the first error.
type ociWriter struct {
	out bytes.Buffer
	tar *tar.Writer
	err error
}

func (o *ociWriter) file(name string, b []byte) {
	if o.err != nil {
		return
	}
	if o.err = o.tar.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(b)), Typeflag: tar.TypeReg}); o.err == nil {
		_, o.err = o.tar.Write(b)
	}
}

func (o *ociWriter) blob(mediaType string, b []byte) v1.Descriptor {
	d := digest.FromBytes(b)
	o.file("blobs/sha256/"+d.Encoded(), b)
	return v1.Descriptor{MediaType: mediaType, Digest: d, Size: int64(len(b))}
}

func (o *ociWriter) json(mediaType string, v any) v1.Descriptor {
	return o.blob(mediaType, o.encode(v))
}

func (o *ociWriter) encode(v any) []byte {
	b, err := json.Marshal(v)
	if err != nil && o.err == nil {
		o.err = err
	}
	return b
}
