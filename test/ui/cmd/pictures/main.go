// SPDX-FileCopyrightText: The Partage Authors
// SPDX-License-Identifier: Apache-2.0

// Command pictures takes the pictures of the page of kubectl gpu ui that the documentation shows.
// It is run in test/ui.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/chromedp/chromedp"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/partage-dev/partage/test/kubectl/fleets"
	"github.com/partage-dev/partage/test/ui"
)

// limit is for one picture, on a machine that does much else.
const limit = 5 * time.Minute

type picture struct {
	name          string
	fleet         func() ([]runtime.Object, error)
	width, height int
	dark          bool
	// at is the fragment of the address, and shown an expression that is true when all is there.
	at, shown string
}

var pictures = []picture{
	{"light", fleets.Demo, 1440, 1290, false, "", "document.querySelector('#waiting').innerText.includes('No device')"},
	{"dark", fleets.Demo, 1440, 1120, true, "#/pod/research/notebook-kim", "document.querySelector('#detail').innerText.includes('What would help')"},
	{"claim", fleets.Demo, 1440, 900, false, "#/claim/serving/api-1", "document.querySelector('#detail').innerText.includes('GPU 2 (35:00) on dgx-1') && document.querySelector('#waiting').innerText.includes('No device')"},
	{"overview", large, 1440, 1000, false, "", "document.querySelectorAll('.mini').length === 4000 && document.title.match(/^[1-9]/) && !document.querySelector('#problems').innerText"},
}

func large() ([]runtime.Object, error) { return fleets.Large(500) }

func main() {
	out := flag.String("out", "../../docs/images", "folder for the pictures")
	flag.Parse()
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt)
	err := run(ctx, *out)
	cancel()
	if err != nil {
		fmt.Fprintln(os.Stderr, "pictures:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out string) error {
	for _, p := range pictures {
		file := filepath.Join(out, "ui-"+p.name+".png")
		if err := p.take(ctx, file); err != nil {
			return fmt.Errorf("picture %s: %w", p.name, err)
		}
		fmt.Println(file)
	}
	return nil
}

func (p picture) take(ctx context.Context, file string) (err error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	objects, err := p.fleet()
	if err != nil {
		return err
	}
	page, err := ui.Open(ctx, objects, p.width, p.height)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, page.Close()) }()
	if p.dark {
		if err := page.Dark(); err != nil {
			return fmt.Errorf("make it dark: %w", err)
		}
	}
	if err := page.Do(chromedp.Navigate(page.URL + p.at)); err != nil {
		return fmt.Errorf("open the page: %w", err)
	}
	if err := page.Wait(p.shown); err != nil {
		return err
	}
	// What claims use comes last.
	if err := page.Wait(`document.querySelector('#summary').innerText.match(/Memory used\s+[1-9][0-9]* GiB of/)`); err != nil {
		return err
	}
	// What moves has come to rest.
	if err := page.Wait("document.getAnimations().every((a) => a.playState === 'finished')"); err != nil {
		return err
	}
	png, err := chromedp.Run(page.Context, chromedp.CaptureScreenshot()) //nolint:contextcheck // the tab has its own
	if err != nil {
		return fmt.Errorf("take the picture: %w", err)
	}
	return os.WriteFile(file, png, 0o644) //nolint:gosec // for all to see
}
